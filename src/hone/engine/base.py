"""What all engines in this process share: requests, states, counters and the proof of weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from enum import StrEnum
from itertools import count
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hone.config.engine import EngineConfig
from hone.engine.detokenizer import StopStringWatcher
from hone.engine.requests import check_request
from hone.engine.sequence import Sequence
from hone.models.manifest import build_manifest, compare
from hone.models.support import context_length
from hone.models.tensor_parallel import TensorParallel
from hone.types import Request, WeightManifest

if TYPE_CHECKING:
    from hone.observe.tracing import EngineTracer

__all__ = ["EngineBase", "EngineState", "check_context"]


class EngineState(StrEnum):
    """What an engine may do: sampling needs `awake`."""

    AWAKE = "awake"
    SYNCING = "syncing"
    """Between `begin_sync` and `finish_sync`, where the weights may be half old, half new; and
    after a sleep in which they were given up."""
    ASLEEP = "asleep"
    """The KV cache is freed, and weights that are the engine's own."""


class EngineBase:
    """The part of an `Engine` that does not depend on what computes."""

    state: EngineState

    def __init__(
        self,
        config: PreTrainedConfig,
        cfg: EngineConfig,
        *,
        eos_token_ids: Collection[int],
        tokenizer: PreTrainedTokenizerBase | None,
        max_model_len: int | None,
        tensor_parallel: TensorParallel,
    ) -> None:
        if tensor_parallel.size != cfg.tensor_parallel_size:
            raise ValueError(
                f"engine.tensor_parallel_size={cfg.tensor_parallel_size}, but the engine was given "
                f"a group of {tensor_parallel.size}: pass "
                "tensor_parallel=TensorParallel.from_environment(...)"
            )
        self.max_model_len = max_model_len or context_length(config)
        check_context(config, self.max_model_len)
        self.weight_version = 0
        """Version of the weights that sample now; 0 before the first sync."""
        self.tracer: EngineTracer | None = None
        """Told of each forward pass."""
        self._tensor_parallel = tensor_parallel
        self._vocab_size = int(config.vocab_size)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._tokenizer = tokenizer
        self._arrivals = count()
        self._sequences: dict[str, Sequence] = {}
        self._num_generated_tokens = self._num_first_tokens = self._num_steps = 0
        self._busy_s = 0.0

    @property
    def needs_weights(self) -> bool:
        """Whether it can sample only once a sync has delivered weights."""
        return self.state is EngineState.SYNCING

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that this rank samples with, tied ones under each of their names."""
        raise NotImplementedError

    def _new_sequences(
        self, requests: Iterable[Request], in_use: Collection[str]
    ) -> dict[str, Sequence]:
        """A sequence for each request, by its id. Raises ValueError, naming the request, for one
        that can never fit, is malformed, or has an id that is `in_use` or comes twice."""
        made: dict[str, Sequence] = {}
        for request in requests:
            if request.id in in_use or request.id in made:
                raise ValueError(f"request id {request.id!r} is already in use")
            params = request.sampling
            stop_ids = self._eos_token_ids.union(params.stop_token_ids)
            if params.ignore_eos:
                stop_ids = frozenset[int]()
            check_request(
                request,
                vocab_size=self._vocab_size,
                max_model_len=self.max_model_len,
                stop_ids=stop_ids,
                has_tokenizer=self._tokenizer is not None,
            )
            watcher = None
            if params.stop and not params.ignore_eos and self._tokenizer is not None:
                watcher = StopStringWatcher(self._tokenizer, params.stop)
            made[request.id] = Sequence(
                request=request, arrival=next(self._arrivals), stop_ids=stop_ids, watcher=watcher
            )
        return made

    def _require_delivered(self, manifest: WeightManifest) -> None:
        """Compare the tensors that sample with a manifest, on every rank. Raises RuntimeError
        naming missing, unexpected and different ones."""
        found = build_manifest(self.named_weights(), manifest.version, are_held=True)
        diff = compare(manifest, found)
        if not self._tensor_parallel.smallest(not diff):
            raise RuntimeError(
                f"weight sync to version {manifest.version} is incomplete: "
                + (diff.describe() if diff else "on another rank")
            )

    def _require(self, *states: EngineState, call: str, hint: str = "") -> None:
        if self.state not in states:
            raise RuntimeError(
                f"{call}() needs an engine that is {' or '.join(states)}; this one is "
                f"{self.state}{hint}"
            )


def check_context(config: PreTrainedConfig, max_model_len: int) -> None:
    """Raise ValueError where sequences may be longer than the model's context."""
    if max_model_len > context_length(config):
        raise ValueError(
            f"max_model_len={max_model_len} exceeds the model's context length of "
            f"{context_length(config)} tokens"
        )
