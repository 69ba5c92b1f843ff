"""The embedded engine: paged KV cache and continuous batching in the trainer's own process.

engine = EmbeddedEngine(model, EngineConfig(), eos_token_ids=(2,))
engine.submit([Request(id="a", prompt_ids=(5, 6), sampling=SamplingParams(max_tokens=8))])
while engine.has_unfinished:
    completions = engine.step()
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hone.engine.base import EngineBase, EngineState, check_context
from hone.engine.block_manager import BlockManager
from hone.engine.kv_cache import (
    KVCache,
    cache_dtype,
    check_max_num_seqs,
    choose_num_blocks,
    most_blocks,
)
from hone.engine.model_runner import LaunchedStep, ModelRunner, Sampled
from hone.engine.scheduler import Scheduler
from hone.engine.sequence import Sequence
from hone.engine.settings import BLOCK_SIZE, EngineConfig, num_snapshots, num_state_rows
from hone.engine.snapshots import Snapshots
from hone.errors import UserError
from hone.families.registry import inputs_of
from hone.models.contents import features_of
from hone.models.failed_pass import free_failed_pass
from hone.models.generation import generation_model
from hone.models.int8_rows import is_packed, pack_rows
from hone.models.manifest import export_weights
from hone.models.ranks import ModelRanks
from hone.types import Completion, EngineStats, Request, StopReason, WeightManifest

if TYPE_CHECKING:
    from hone.engine.sleeping_weights import SleepingWeights

__all__ = ["EmbeddedEngine", "EngineState", "make_cache"]

_log = logging.getLogger(__name__)


class EmbeddedEngine(EngineBase):
    """Samples from a model in this process, with continuous batching over a paged KV cache.

    `model` comes from `load_model`; the public name of this class is `hone.Engine`. There is no
    background thread: `submit` queues requests, and each `step` computes one token of every running
    sequence.

    The model's parameters may be aliases of a trainer's, which then owns them:
    `EngineConfig.gpu_memory_utilization` is a share of the *total* device memory that holds the KV
    cache and the activations of one step, and the weights only with `owns_weights`. In that case
    `sleep` also frees the weights, where `EngineConfig.enable_sleep` is set.

    `eos_token_ids` end every request that does not ignore them. `tokenizer` is used only for stop
    strings. `max_model_len`, in tokens, is the model's context length where it is not given. Raises
    ValueError where the cache cannot hold one sequence of that length.

    With `tensor_parallel`, `model` is this rank's, from `shard_model`. All ranks of the group make
    an engine and then the same calls in the same order, and get the same results.

    With `exact`, the log-probability of a token has the same bits in every batch and in a trainer
    in exact mode. Raises UserError where the model is not served, ValueError with an FP8 cache or
    tensor parallelism.

    With `records_routes` completions include the experts that each token passed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cfg: EngineConfig,
        *,
        eos_token_ids: Collection[int],
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_model_len: int | None = None,
        block_size: int = BLOCK_SIZE,
        owns_weights: bool = False,
        tensor_parallel: ModelRanks | None = None,
        exact: bool = False,
        records_routes: bool = False,
    ) -> None:
        tp = tensor_parallel or ModelRanks(model.device)
        super().__init__(
            model.config,
            cfg,
            eos_token_ids=eos_token_ids,
            tokenizer=tokenizer,
            max_model_len=max_model_len,
            tensor_parallel=tp,
            inputs=inputs_of(model.config),
        )
        if exact and (cfg.kv_cache_dtype == "fp8" or tp.size > 1):
            raise ValueError(
                "exact mode has neither FP8 keys and values nor tensor parallelism: got "
                f"engine.kv_cache_dtype={cfg.kv_cache_dtype}, "
                f"engine.tensor_parallel_size={tp.size}; use auto and 1"
            )
        self.model = model
        self._packed = {name for name, weight in export_weights(model) if is_packed(weight)}
        self.state = EngineState.AWAKE
        self._weight_bytes = sum(p.nbytes for p in model.parameters()) if owns_weights else 0
        self._weights: SleepingWeights | None = None
        if owns_weights and cfg.enable_sleep:
            from hone.engine.sleeping_weights import SleepingWeights

            self._weights = SleepingWeights(model)
        self._cache = make_cache(
            model.config,
            cfg,
            device=model.device,
            dtype=model.dtype,
            max_model_len=self.max_model_len,
            resident_bytes=self._weight_bytes,
            block_size=block_size,
            records_routes=records_routes,
        )
        compiles = not cfg.enforce_eager
        self._runner = ModelRunner(
            generation_model(
                model, compile=compiles, tp=tp, exact=exact, records_routes=records_routes
            ),
            self._cache,
            vocab_size=int(model.config.vocab_size),
            max_num_seqs=cfg.max_num_seqs,
            max_num_batched_tokens=cfg.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            cuda_graphs=not cfg.enforce_eager,
            inputs=self._inputs,
            features=features_of(model),
        )
        activations = 0
        if model.device.type == "cuda" and cfg.kv_cache_gib is None:
            self._cache.allocate(num_blocks=1)
            activations = self._runner.measure_activations()
            self._cache.free()
        features = features_of(model)
        features_bytes = 0 if features is None else features.max_bytes
        num_blocks = choose_num_blocks(
            self._cache,
            cfg,
            max_model_len=self.max_model_len,
            reserved_bytes=activations + features_bytes,
            resident_bytes=(
                self._weight_bytes + self._runner.state_bytes + self._cache.state_bytes
            ),
        )
        num_blocks = tp.smallest(num_blocks)  # ranks may have different amounts of free memory
        self._cache.allocate(num_blocks)
        self._blocks = BlockManager(
            num_blocks=num_blocks,
            block_size=block_size,
            enable_prefix_caching=cfg.enable_prefix_caching,
            snapshots=self._snapshots(cfg),
        )
        self._scheduler = Scheduler(
            self._blocks,
            max_num_seqs=cfg.max_num_seqs,
            max_num_batched_tokens=cfg.max_num_batched_tokens,
            prefills_stop_decodes=model.device.type == "cuda" and not cfg.enforce_eager,
            keeps_contents_whole=self._inputs.attends_within,
            on_vacate=self._take_routes if records_routes else None,
        )
        self._in_flight: deque[LaunchedStep] = deque()
        # On a CPU a step is complete when its launch returns.
        self._max_in_flight = 1 if model.device.type == "cuda" else 0
        self._finished: list[Completion] = []
        self._num_planned = 0
        """Tokens of the newest step."""

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is queued, running, or finished and not returned yet."""
        return bool(self._sequences or self._finished)

    def submit(self, requests: Seq[Request]) -> None:
        """Queue requests, all or none. Legal in any state.

        Raises ValueError for one that can never fit, is malformed, or reuses an unfinished id.
        """
        in_use = self._sequences.keys() | {done.request_id for done in self._finished}
        added = self._new_sequences(requests, in_use)
        self._sequences.update(added)
        for new in added.values():
            self._scheduler.add(new)

    def step(self) -> list[Completion]:
        """Launch the next token of every running sequence; return newly finished completions.

        On CUDA one step is in flight: tokens become known, and completions are returned, one call
        after their launch. A prompt longer than `max_num_batched_tokens` takes several steps to its
        first token. When the model raises, all requests return to the queue with their known
        tokens. After an out-of-memory error the call does not raise: later steps are smaller, until
        some have succeeded. Raises torch.OutOfMemoryError where no smaller step is possible, and
        with several ranks.
        """
        self._require(EngineState.AWAKE, call="step")
        try:
            with self._requeue_on_error():
                self._advance()
        except torch.OutOfMemoryError as error:
            self._shrink(error)
        finished, self._finished = self._finished, []
        return finished

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        """Withdraw requests and return their completions so far, with stop reason `abort`.

        Ids that are not queued or running are skipped: they may just have finished. A token in
        flight is dropped; resumed with the same seed, the request samples it again.
        """
        aborted = {name: self._sequences[name] for name in request_ids if name in self._sequences}
        for name in aborted:
            del self._sequences[name]
        self._scheduler.remove(aborted.values())
        return [sequence.completion(StopReason.ABORT) for sequence in aborted.values()]

    def sleep(self) -> None:
        """Free the KV cache, and the weights where the engine owns them; their contents are lost.

        Raises RuntimeError while sequences run or the engine is not awake.
        """
        lacks_weights = [EngineState.SYNCING] if self._weights is not None else []
        self._require(EngineState.AWAKE, *lacks_weights, call="sleep")
        self._drain()
        if self._scheduler.running:
            raise RuntimeError(
                f"sleep() while {len(self._scheduler.running)} sequences run; "
                "finish or abort them first"
            )
        self._cache.sleep()
        if self._weights is not None:
            self._weights.sleep()
        self._blocks.invalidate_prefixes()
        self.state = EngineState.ASLEEP

    def wake(self) -> None:
        """Allocate the memory again, at its old addresses. Freed weights must be delivered by a
        sync before sampling.

        Raises UserError with both sizes, and stays asleep, where memory is lacking.
        """
        self._require(EngineState.ASLEEP, call="wake")
        with ExitStack() as taken:
            is_there = False
            try:
                if self._weights is not None:
                    self._weights.wake()
                    taken.callback(self._weights.sleep)
                self._cache.wake()
                taken.callback(self._cache.sleep)
                is_there = True
            finally:
                is_everywhere = self._tensor_parallel.smallest(is_there)
            if not is_everywhere:
                raise UserError("another rank lacks the memory to wake; its error has the sizes")
            taken.pop_all()
        self.state = EngineState.AWAKE if self._weights is None else EngineState.SYNCING

    def begin_sync(self) -> None:
        """Refuse to sample until `finish_sync` has confirmed a manifest.

        Legal again after a delivery that failed, so that it can be repeated.
        """
        self._require(EngineState.AWAKE, EngineState.SYNCING, call="begin_sync")
        self._drain()
        self.state = EngineState.SYNCING

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters, tied ones under each of their names, and persistent buffers."""
        return export_weights(self.model)

    def shard(self, name: str, tensor: Tensor) -> Tensor:
        """This engine rank's part of a full weight: a view, or the tensor itself, or its int8 rows
        where the engine samples with these."""
        part = self._tensor_parallel.shard_of(name, tensor, self.model.config)
        return pack_rows(part) if name in self._packed else part

    def finish_sync(self, manifest: WeightManifest) -> None:
        """Compare the engine's own tensors with the manifest and adopt its version.

        From then on no cached prefix of older weights is used. Running sequences go on with the
        keys and values they have; `weight_versions` records the version of each of their tokens. A
        sequence in prefill has no token yet to record the old version, so its prefill starts again.
        With an FP8 cache, whose scales are chosen anew, all keys and values are computed again.
        Raises RuntimeError naming missing, unexpected and different tensors, and also where
        sampling no longer uses the named tensors; the engine then stays in sync, and the weights
        can be delivered again.
        """
        self._require(EngineState.SYNCING, call="finish_sync")
        self._require_delivered(manifest)
        # Otherwise sampling would use memory that the manifest does not cover.
        self._runner.model.require_in_place()
        self.weight_version = manifest.version
        if self._runner.recalibrate():
            if self._cache.routes is not None:  # a new computation may choose other experts
                for sequence in self._scheduler.running:
                    self._take_routes(sequence)
            self._requeue()
        else:
            self._scheduler.restart_prefills()
        self._blocks.invalidate_prefixes()
        self.state = EngineState.AWAKE

    def stats(self) -> EngineStats:
        """A snapshot; counters run since the engine was made."""
        scheduler = self._scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            kv_cache_usage=self._blocks.usage,
            kv_cache_bytes=self._cache.num_bytes,
            weight_bytes=self._weight_bytes,
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_steps=self._num_steps,
            busy_s=self._busy_s,
            num_first_tokens=self._num_first_tokens,
        )

    def _snapshots(self, cfg: EngineConfig) -> Snapshots | None:
        """Snapshots of a model with recurrent layers, in the rows behind those of the slots."""
        if not self._inputs.has_states:
            return None
        first = self._runner.max_num_seqs + 1
        number = num_snapshots(cfg.max_num_seqs, enable_prefix_caching=cfg.enable_prefix_caching)
        return Snapshots(range(first, first + number))

    def _advance(self) -> None:
        """Launch a step and process the tokens of an earlier one."""
        started_s = perf_counter()
        plan = self._scheduler.schedule()
        if plan:
            if self.tracer is not None:
                self.tracer.begin(self.weight_version, is_prefill=bool(plan.chunks))
            self._num_planned = plan.num_tokens
            self._in_flight.append(self._runner.launch(plan, self.weight_version))
            self._num_steps += 1
            if self._scheduler.limit.succeed():
                _log.info("steps of at most %d tokens again", self._scheduler.limit.now)
        self._collect(self._max_in_flight if plan else 0)
        if self.tracer is not None:
            self.tracer.end(is_idle=not self._sequences)
        self._busy_s += perf_counter() - started_s

    def _shrink(self, error: torch.OutOfMemoryError) -> None:
        """Continue with smaller steps after an out-of-memory error; raise where no smaller step is
        possible."""
        limit, num_tokens = self._scheduler.limit, self._num_planned
        if self._tensor_parallel.size > 1 or not limit.fail(num_tokens):
            raise error
        free_failed_pass(error, self.model.device)
        _log.warning(
            "warning: out of memory in a step of the engine, of %d tokens. Its sequences wait and "
            "are computed again, in steps of at most %d tokens until some have succeeded. Set "
            "engine.max_num_batched_tokens=%d, or lower engine.gpu_memory_utilization, to keep the "
            "memory free.\nFrom torch: %s",
            num_tokens,
            limit.now,
            limit.now,
            error,
        )

    def _drain(self) -> None:
        """Process the tokens of all steps in flight."""
        with self._requeue_on_error():
            self._collect(0)

    @contextmanager
    def _requeue_on_error(self) -> Generator[None]:
        """Context that sends every request back to the queue, with its tokens, when the model or
        the tokenizer raises."""
        try:
            yield
        except Exception:
            self._requeue()
            raise

    def _requeue(self) -> None:
        """Send all requests back to the queue with their known tokens."""
        self._in_flight.clear()
        self._scheduler.restart(self._sequences.values())

    def _take_routes(self, sequence: Sequence) -> None:
        """Keep the routes of a sequence's processed tokens before it loses their blocks. Waits for
        the device.

        Routes of an unfinished prefill belong to no sampled token yet and are dropped: the prefill
        starts again, perhaps with other weights.
        """
        had = sequence.routes
        start = 0 if had is None else len(had)
        end = sequence.num_computed
        if sequence.has_ended:  # routes of the last token are never used
            end = min(end, len(sequence.token_ids) - 1)
        if not sequence.is_decoding or end <= start:
            return
        positions = torch.arange(start, end)
        size = self._blocks.block_size
        slots = torch.tensor(sequence.block_table)[positions // size] * size + positions % size
        found = self._cache.routes_of(slots.to(self._cache.device)).numpy()
        sequence.routes = found if had is None else np.concatenate([had, found])

    def _collect(self, max_in_flight: int) -> None:
        """Process the tokens of the oldest steps until at most `max_in_flight` steps are in
        flight."""
        while len(self._in_flight) > max_in_flight:
            step = self._in_flight.popleft()
            ended: dict[Sequence, StopReason] = {}
            try:
                for sampled in step.results():
                    if not sampled.sequence.has_ended:
                        self._append(sampled, step.weight_version, ended)
            finally:  # ended requests must not return to the queue if the tokenizer raises
                self._finish(ended)

    def _finish(self, ended: dict[Sequence, StopReason]) -> None:
        if ended:
            self._scheduler.remove(ended)
        # In this order, since a sequence that is in both has finished.
        for sequence, reason in ended.items():
            self._finished.append(sequence.completion(reason))
            del self._sequences[sequence.request.id]

    def _append(
        self, sampled: Sampled, weight_version: int, ended: dict[Sequence, StopReason]
    ) -> None:
        """Append the sampled token to its sequence."""
        sequence = sampled.sequence
        sequence.num_in_flight -= 1
        self._num_first_tokens += not sequence.logprobs
        reason = sequence.append(sampled.token_id, sampled.logprob, weight_version)
        self._num_generated_tokens += 1
        if reason is not None:
            ended[sequence] = reason


def make_cache(
    config: PreTrainedConfig,
    cfg: EngineConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
    resident_bytes: int,
    block_size: int = BLOCK_SIZE,
    records_routes: bool = False,
) -> KVCache:
    """The KV cache, not allocated yet, of an engine with settings `cfg`.

    The model of `config` (one rank's) computes in `dtype` and takes `resident_bytes` of the
    engine's share, whether it is loaded or not. Raises ValueError with the numbers where sequences
    of `max_model_len` tokens fit neither the model's context nor memory, UserError for an FP8 cache
    on a GPU without.
    """
    check_context(config, max_model_len)
    if cfg.kv_cache_dtype == "fp8" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            raise UserError(
                "engine.kv_cache_dtype=fp8 needs a GPU of compute capability 8.9 or more, "
                f"{torch.cuda.get_device_name(device)} has {capability}; use auto"
            )
    num_rows = partial(num_state_rows, enable_prefix_caching=cfg.enable_prefix_caching)
    cache = KVCache(
        config,
        block_size=block_size,
        dtype=cache_dtype(cfg, dtype),
        device=device,
        records_routes=records_routes,
        num_state_rows=num_rows(cfg.max_num_seqs),
        model_dtype=dtype,
    )
    # float32 logits and a block table; states, with those of prompts
    bytes_per_sequence = 4 * (int(config.vocab_size) + max_model_len // block_size + 1)
    check_max_num_seqs(
        cache,
        cfg,
        max_model_len=max_model_len,
        bytes_of=lambda number: (
            number * bytes_per_sequence + num_rows(number) * cache.state_row_bytes
        ),
        resident_bytes=resident_bytes,
    )
    # Raises here the errors of `choose_num_blocks` that are already certain.
    most_blocks(
        cache, cfg, max_model_len=max_model_len, reserved_bytes=0, resident_bytes=resident_bytes
    )
    return cache
