"""Base class of all engines: requests, states, counters and the proof of weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from enum import StrEnum
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hone.engine.requests import check_request
from hone.engine.sequence import Sequence
from hone.engine.settings import EngineConfig
from hone.model_input import TEXT_ONLY, InputSpec
from hone.models.manifest import build_manifest, compare
from hone.models.ranks import ModelRanks
from hone.models.support import context_length
from hone.types import Request, WeightManifest

if TYPE_CHECKING:
    from hone.engine.detokenizer import StopStringWatcher
    from hone.observe.tracing import EngineTracer

__all__ = ["EngineBase", "EngineState", "check_context", "deliver"]


class EngineState(StrEnum):
    """State of an engine; it samples only when `awake`."""

    AWAKE = "awake"
    SYNCING = "syncing"
    """Between `begin_sync` and `finish_sync`, when weights may be half old, half new; and after a
    sleep that freed the weights."""
    ASLEEP = "asleep"
    """The KV cache is freed, and so are weights that the engine owns."""


class EngineBase:
    """The part of an `Engine` that does not depend on the backend."""

    state: EngineState

    def __init__(
        self,
        config: PreTrainedConfig,
        cfg: EngineConfig,
        *,
        eos_token_ids: Collection[int],
        tokenizer: PreTrainedTokenizerBase | None,
        max_model_len: int | None,
        tensor_parallel: ModelRanks,
        inputs: InputSpec = TEXT_ONLY,
    ) -> None:
        """`inputs` are the inputs other than token ids that requests may have, by default none."""
        if tensor_parallel.size != cfg.tensor_parallel_size:
            raise ValueError(
                f"engine.tensor_parallel_size={cfg.tensor_parallel_size}, but the engine was given "
                f"a group of {tensor_parallel.size}: pass "
                "tensor_parallel=TensorParallel.from_environment(...)"
            )
        self.max_model_len = max_model_len or context_length(config)
        check_context(config, self.max_model_len)
        self.weight_version = 0
        """Version of the weights that the engine samples with; 0 before the first sync."""
        self.tracer: EngineTracer | None = None
        """Records each forward pass."""
        self._tensor_parallel = tensor_parallel
        self._vocab_size = int(config.vocab_size)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._watch: Callable[[tuple[str, ...]], StopStringWatcher] | None = None
        """Creates the watcher for a request's stop strings."""
        if tokenizer is not None:
            from hone.engine.detokenizer import StopStringWatcher

            self._watch = partial(StopStringWatcher, tokenizer)
        self._inputs = inputs
        self._max_num_batched_tokens = cfg.max_num_batched_tokens
        self._arrivals = count()
        self._sequences: dict[str, Sequence] = {}
        self._num_generated_tokens = self._num_first_tokens = self._num_steps = 0
        self._busy_s = 0.0

    @property
    def needs_weights(self) -> bool:
        """Whether the engine needs a sync before it can sample."""
        return self.state is EngineState.SYNCING

    def tokens_since(self, request_id: str, start: int) -> tuple[list[int], list[float]]:
        """The tokens of an unfinished request from completion token `start` on, as known so far,
        with their log-probabilities; empty for a request that the engine does not have."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return [], []
        num_prompt = len(sequence.request.prompt_ids)
        return sequence.token_ids[num_prompt + start :], sequence.logprobs[start:]

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that this rank samples with, tied ones under each of their names."""
        raise NotImplementedError

    def write(self, parts: Mapping[str, tuple[Tensor, Tensor]]) -> int:
        """Copy parts of weights, each (target, source), into tensors of `named_weights`; return the
        bytes written."""
        return deliver(list(parts.values()))

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
                has_tokenizer=self._watch is not None,
                max_num_batched_tokens=self._max_num_batched_tokens,
                inputs=self._inputs,
            )
            watcher = None
            if params.stop and not params.ignore_eos and self._watch is not None:
                watcher = self._watch(params.stop)
            made[request.id] = Sequence(
                request=request, arrival=next(self._arrivals), stop_ids=stop_ids, watcher=watcher
            )
        return made

    def _require_delivered(self, manifest: WeightManifest) -> None:
        """Compare the engine's tensors with a manifest, on every rank. Raises RuntimeError naming
        missing, unexpected and different tensors."""
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


def deliver(pairs: Seq[tuple[Tensor, Tensor]]) -> int:
    """Copy each source into its target (target, source), casting; return the bytes written."""
    if pairs:
        targets, sources = zip(*pairs, strict=True)
        # The public `copy_` makes one launch per tensor; this one fuses all copies, casts included.
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateUsage]
    return sum(target.nbytes for target, _ in pairs)
