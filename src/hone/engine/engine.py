"""The embedded engine: paged KV cache and continuous batching in the trainer's own process.

engine = EmbeddedEngine(model, EngineConfig(), eos_token_ids=(2,))
engine.submit([Request(id="a", prompt_ids=(5, 6), sampling=SamplingParams(max_tokens=8))])
while engine.has_unfinished:
    completions = engine.step()
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Seq
from enum import StrEnum
from itertools import count
from time import perf_counter

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hone.config.engine import EngineConfig
from hone.engine.block_manager import BlockManager
from hone.engine.detokenizer import StopStringWatcher
from hone.engine.kv_cache import KVCache, choose_num_blocks
from hone.engine.model_runner import ModelRunner
from hone.engine.requests import check_request
from hone.engine.scheduler import Batch, Scheduler
from hone.engine.sequence import Sequence
from hone.models.manifest import build_manifest, compare, export_weights
from hone.models.support import context_length
from hone.types import Completion, EngineStats, Request, StopReason, WeightManifest

__all__ = ["EmbeddedEngine", "EngineState"]


class EngineState(StrEnum):
    """What an engine may do: sampling needs `awake`."""

    AWAKE = "awake"
    SYNCING = "syncing"
    """Between `begin_sync` and `finish_sync`: the weights may be half old, half new."""
    ASLEEP = "asleep"
    """The KV cache is freed."""


class EmbeddedEngine:
    """The `Engine` protocol over a transformers model with attention `hone`, on its device.

    The model's parameters may be aliases of a trainer's, who then owns them:
    `EngineConfig.gpu_memory_utilization` is a share of the *total* device memory that holds the KV
    cache and the activations of one step, and the weights only with `owns_weights`.

    `eos_token_ids` end every request that does not ignore them. `tokenizer` serves stop strings
    alone. `max_model_len`, in tokens, overrides the configured one. Raises ValueError where the
    cache cannot hold one sequence of that length.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cfg: EngineConfig,
        *,
        eos_token_ids: Collection[int],
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_model_len: int | None = None,
        owns_weights: bool = False,
    ) -> None:
        self.model = model
        self.max_model_len = _model_len(model, max_model_len or cfg.max_model_len)
        self.state = EngineState.AWAKE
        self._eos_token_ids = frozenset(eos_token_ids)
        self._tokenizer = tokenizer
        self._vocab_size = int(model.config.vocab_size)
        self._cache = KVCache(
            model.config, block_size=cfg.block_size, dtype=model.dtype, device=model.device
        )
        self._runner = ModelRunner(
            model,
            self._cache,
            max_num_seqs=cfg.max_num_seqs,
            max_num_batched_tokens=cfg.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            cuda_graphs=cfg.cuda_graphs,
            compile=cfg.compile,
        )
        reserved = 0
        if model.device.type == "cuda" and cfg.kv_cache_gib is None:
            reserved = self._runner.measure_activations()
            if owns_weights:
                reserved += sum(tensor.nbytes for tensor in model.parameters())
        num_blocks = choose_num_blocks(
            self._cache, cfg, max_model_len=self.max_model_len, reserved_bytes=reserved
        )
        self._cache.allocate(num_blocks)
        self._blocks = BlockManager(
            num_blocks=num_blocks,
            block_size=cfg.block_size,
            enable_prefix_caching=cfg.enable_prefix_caching,
        )
        self._scheduler = Scheduler(
            self._blocks,
            max_num_seqs=cfg.max_num_seqs,
            max_num_batched_tokens=cfg.max_num_batched_tokens,
        )
        self._sequences: dict[str, Sequence] = {}
        self._arrivals = count()
        self._weight_version = 0
        self._num_generated_tokens = 0
        self._num_steps = 0
        self._busy_s = 0.0

    @property
    def weight_version(self) -> int:
        """Version of the weights that sample now; 0 before the first sync."""
        return self._weight_version

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is queued or running."""
        return bool(self._sequences)

    def submit(self, requests: Seq[Request]) -> None:
        """Queue requests, all or none. Legal in any state.

        Raises ValueError for one that can never fit, is malformed, or reuses an unfinished id.
        """
        added: dict[str, Sequence] = {}
        for request in requests:
            if request.id in self._sequences or request.id in added:
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
            added[request.id] = Sequence(
                request=request, arrival=next(self._arrivals), stop_ids=stop_ids, watcher=watcher
            )
        self._sequences.update(added)
        for new in added.values():
            self._scheduler.add(new)

    def step(self) -> list[Completion]:
        """Advance every running sequence by at least one token; return those that finished.

        A prompt longer than `max_num_batched_tokens` takes several steps to its first token. When
        the model raises, everything returns to the queue with what it has sampled.
        """
        self._require(EngineState.AWAKE, call="step")
        started_s = perf_counter()
        batch = self._scheduler.schedule()
        finished = self._run(batch) if batch.sequences else []
        self._busy_s += perf_counter() - started_s
        return finished

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        """Withdraw requests and return what they had, with stop reason `abort`.

        Ids that are not queued or running are passed over: they may just have finished.
        """
        aborted = [self._sequences.pop(name) for name in request_ids if name in self._sequences]
        self._scheduler.remove(aborted)
        return [sequence.completion(StopReason.ABORT) for sequence in aborted]

    def sleep(self) -> None:
        """Free the KV cache. Raises RuntimeError while sequences run or the engine is not awake."""
        self._require(EngineState.AWAKE, call="sleep")
        if self._scheduler.running:
            raise RuntimeError(
                f"sleep() while {len(self._scheduler.running)} sequences run; "
                "finish or abort them first"
            )
        self._runner.free_cache()
        self._blocks.invalidate_prefixes()
        self.state = EngineState.ASLEEP

    def wake(self) -> None:
        """Allocate the KV cache again.

        Raises UserError with both sizes, and stays asleep, where the memory is not there.
        """
        self._require(EngineState.ASLEEP, call="wake")
        self._cache.allocate(self._blocks.num_blocks)
        self.state = EngineState.AWAKE

    def begin_sync(self) -> None:
        """Refuse to sample until `finish_sync` has confirmed a manifest.

        Legal again after a delivery that failed, so that it can be repeated.
        """
        self._require(EngineState.AWAKE, EngineState.SYNCING, call="begin_sync")
        self.state = EngineState.SYNCING

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters, tied ones under each of their names, and persistent buffers."""
        return export_weights(self.model)

    def finish_sync(self, manifest: WeightManifest) -> None:
        """Compare the engine's own tensors with the manifest and adopt its version.

        From then on no cached prefix of older weights is used. Sequences in flight go on with the
        keys and values they have; `weight_versions` tells their tokens apart. Raises RuntimeError
        naming missing, unexpected and different tensors, and stays in sync: the weights can be
        delivered again.
        """
        self._require(EngineState.SYNCING, call="finish_sync")
        diff = compare(manifest, build_manifest(self.named_weights(), manifest.version))
        if diff:
            raise RuntimeError(
                f"weight sync to version {manifest.version} is incomplete: {diff.describe()}"
            )
        self._weight_version = manifest.version
        self._blocks.invalidate_prefixes()
        self.state = EngineState.AWAKE

    def stats(self) -> EngineStats:
        """A snapshot; counters run since the engine was made."""
        scheduler = self._scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            kv_cache_usage=self._blocks.usage,
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_steps=self._num_steps,
            busy_s=self._busy_s,
        )

    def _run(self, batch: Batch) -> list[Completion]:
        try:
            sampled, token_ids, logprobs = self._runner.run(batch)
        except BaseException:
            self._scheduler.preempt_all()
            raise
        for running, size in zip(batch.sequences, batch.num_tokens, strict=True):
            running.num_computed += size
        ended: dict[Sequence, StopReason] = {}
        for running, token_id, logprob in zip(sampled, token_ids, logprobs, strict=True):
            reason = running.append(token_id, logprob, self._weight_version)
            if reason is not None:
                ended[running] = reason
        self._num_steps += 1
        self._num_generated_tokens += len(token_ids)
        if ended:
            self._scheduler.remove(ended)
            for done in ended:
                del self._sequences[done.request.id]
        return [done.completion(reason) for done, reason in ended.items()]

    def _require(self, *states: EngineState, call: str) -> None:
        if self.state not in states:
            raise RuntimeError(
                f"{call}() needs an engine that is {' or '.join(states)}; this one is {self.state}"
            )


def _model_len(model: PreTrainedModel, asked: int | None) -> int:
    """The longest sequence served: as asked, else what the model's positions are made for."""
    longest = context_length(model.config)
    if asked is not None and asked > longest:
        raise ValueError(
            f"engine.max_model_len={asked} exceeds the model's context length of {longest} tokens"
        )
    return asked or longest
