"""vLLM behind the `Engine` protocol, in this process.

engine = VLLMEngine(model, EngineConfig(backend="vllm"), eos_token_ids=(2,))
engine.submit([Request(id="a", prompt_ids=(5, 6), sampling=SamplingParams(max_tokens=8))])
while engine.has_unfinished:
    completions = engine.step()

vLLM schedules, computes and draws. Which token ends a request, its versions, and which weights
arrived are decided here, by the code of the embedded engine, so that both engines mean the same.

Weights are its own, and lie in its tensors as it likes: `hone.engine.vllm.weights` has the views
that a sync writes into and proves, `hone.engine.vllm.routes` what it tells of experts.
`hone.engine.vllm.setup` makes it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hone.engine.base import EngineBase, EngineState
from hone.engine.sequence import Sequence
from hone.engine.settings import EngineConfig
from hone.engine.vllm.facts import LOWEST_TEMPERATURE
from hone.engine.vllm.routes import VLLMRoutes
from hone.engine.vllm.setup import make_vllm
from hone.engine.vllm.weights import VLLMWeights, check_reads_weights
from hone.models.manifest import build_manifest, export_weights, match_layout
from hone.models.tensor_parallel import TensorParallel
from hone.types import Completion, EngineStats, Request, StopReason, WeightManifest

__all__ = ["VLLMEngine"]


class VLLMEngine(EngineBase):
    """The `Engine` protocol over vLLM, with a copy of the weights of `model`.

    `model` gives architecture, dtype and, unless it lies on the meta device, the first weights, as
    version 0; it is not used afterwards. One on the meta device needs `device`, and its engine a
    sync before it samples. `eos_token_ids` end every request that does not ignore them; `tokenizer`
    serves stop strings alone. `max_model_len`, in tokens, is the model's context length by default.

    With `engine.enable_sleep` on a GPU, `sleep` frees the KV cache and moves the weights to the
    host. On a CPU vLLM frees nothing. With `records_routes` completions tell which experts each
    token passed; that takes host memory, a byte for each token of the KV cache, layer and choice.

    Draws are from the same distributions as the embedded engine's, but other draws. A sequence that
    is resumed, or that runs out of cache and is queued again, draws differently from there on than
    one that is not. In a process group of several, all make an engine together, one each.

    With `tensor_parallel` this is one rank of an engine. `model` is the whole model still, of which
    a rank takes its parts. All ranks of the group make an engine and then the same calls in the
    same order; what they return is the same, too.

    After an exception out of vLLM itself the engine is in no known state: make it anew. Raises
    UserError where vLLM is not installed, of a version that is not served, or cannot serve the
    model; ValueError where `max_model_len` exceeds the model's context, or the group is not of
    `engine.tensor_parallel_size`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cfg: EngineConfig,
        *,
        eos_token_ids: Collection[int],
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_model_len: int | None = None,
        device: torch.device | None = None,
        tensor_parallel: TensorParallel | None = None,
        records_routes: bool = False,
    ) -> None:
        device = device or model.device
        tp = tensor_parallel or TensorParallel(rank=0, size=1, device=device)
        super().__init__(
            model.config,
            cfg,
            eos_token_ids=eos_token_ids,
            tokenizer=tokenizer,
            max_model_len=max_model_len,
            tensor_parallel=tp,
        )
        self._vllm, self._llm = make_vllm(
            model,
            cfg,
            device=device,
            max_model_len=self.max_model_len,
            tp=tp,
            records_routes=records_routes,
        )
        self._routes = VLLMRoutes(model.config, self._llm) if records_routes else None
        self._caches_prefixes = cfg.enable_prefix_caching
        self._frees_memory = cfg.enable_sleep
        self._on_cpu = device.type == "cpu"
        module = self._llm.apply_model(lambda module: module)[0]
        if self._on_cpu:
            check_reads_weights(module)
        is_tied = bool(getattr(model.config, "tie_word_embeddings", False))
        self._weights = VLLMWeights(module, is_tied=is_tied)
        self._weight_bytes = sum(parameter.nbytes for parameter in module.parameters())
        self._counters = _Counters()
        self._llm.logger_manager = self._counters
        self.state = EngineState.SYNCING
        self._lacks_weights = True
        self._keys: dict[str, str] = {}
        """Name of each request in vLLM; a request that is sent again gets a new one."""
        self._by_key: dict[str, Sequence] = {}
        self._handed_over = count()
        self._num_syncs = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        if model.device.type != "meta":
            self._adopt(model)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is queued or running."""
        return bool(self._sequences)

    def submit(self, requests: Seq[Request]) -> None:
        """Queue requests, all or none. Legal in any state.

        Raises ValueError for one that can never fit, is malformed, has a temperature that vLLM does
        not serve, or reuses an unfinished id.
        """
        for request in requests:
            _check_temperature(request)
        added = self._new_sequences(requests, self._sequences)
        self._sequences |= added
        if self.state is not EngineState.ASLEEP:  # else `wake` does it
            self._hand_over(added.values())

    def step(self) -> list[Completion]:
        """Sample the next token of every running sequence; return those that finished.

        A prompt longer than `max_num_batched_tokens` takes several steps to its first token.
        """
        self._require(EngineState.AWAKE, call="step")
        if not self._sequences:
            return []
        started_s = perf_counter()
        if self.tracer is not None:
            begins = any(not sequence.logprobs for sequence in self._sequences.values())
            self.tracer.begin(self.weight_version, is_prefill=begins)
        if self._on_cpu:
            # Torch settles how many threads work for a thread when that first asks. vLLM's kernels
            # count before and after, and fail where the trainer's thread has changed it since.
            torch.get_num_threads()
        with self._eagerly():
            outputs = self._llm.step()
        self._num_steps += 1
        finished: list[Completion] = []
        excess: list[str] = []
        for output in outputs:
            sequence = self._by_key.get(output.request_id)
            if sequence is None:  # withdrawn
                continue
            reason = self._append(sequence, output)
            if reason is not None:
                if self._routes is not None:
                    self._routes.take(output.request_id, sequence, output)
                finished.append(sequence.completion(reason))
                if not output.finished:
                    excess.append(output.request_id)
                self._forget(sequence)
            elif output.finished:
                raise RuntimeError(
                    f"vLLM ended request {sequence.request.id!r} after {len(sequence.logprobs)} of "
                    f"{sequence.request.sampling.max_tokens} tokens, with reason "
                    f"{output.outputs[0].finish_reason!r}, which nobody asked for"
                )
        self._withdraw(excess)
        if self.tracer is not None:
            self.tracer.end(is_idle=not self._sequences)
        self._busy_s += perf_counter() - started_s
        return finished

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        """Withdraw requests and return what they had, with stop reason `abort`.

        Ids that are not queued or running are passed over: they may just have finished.
        """
        aborted = [self._sequences[name] for name in request_ids if name in self._sequences]
        self._take_back(aborted)
        for sequence in aborted:
            del self._sequences[sequence.request.id]
        return [sequence.completion(StopReason.ABORT) for sequence in aborted]

    def sleep(self) -> None:
        """Free the KV cache and move the weights to the host; queued requests stay.

        Raises RuntimeError while sequences run or the engine is not awake.
        """
        self._require(EngineState.AWAKE, call="sleep")
        if running := self._num_running():
            raise RuntimeError(f"sleep() while {running} sequences run; finish or abort them first")
        self._take_back(self._sequences.values())
        if self._frees_memory:
            self._llm.sleep(level=1)
        self.state = EngineState.ASLEEP

    def wake(self) -> None:
        """Allocate the memory that `sleep` freed, and restore the weights."""
        self._require(EngineState.ASLEEP, call="wake")
        if self._frees_memory:
            self._wake_all()
        self.state = EngineState.AWAKE
        self._hand_over(self._sequences.values())

    def begin_sync(self) -> None:
        """Refuse to sample until `finish_sync` has confirmed a manifest.

        Running sequences keep their keys and values. Legal again after a delivery that failed.
        """
        self._require(EngineState.AWAKE, EngineState.SYNCING, call="begin_sync")
        self.state = EngineState.SYNCING

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that vLLM computes with, of this rank: views into its tensors, tied ones by
        each name."""
        return self._weights.named()

    def shard(self, name: str, tensor: Tensor) -> Tensor:
        """The part of a full weight that this engine's rank holds: a view, or the tensor itself.

        Raises RuntimeError where a weight that ranks share is not of the size to be shared.
        """
        return self._weights.shard(name, tensor)

    def finish_sync(self, manifest: WeightManifest) -> None:
        """Compare what vLLM computes with to the manifest, and adopt its version.

        From then on no prefix cached under older weights is used, except by the sequences that are
        running, which go on with the keys and values they have. One without a token has none that
        would tell of older weights, so its prefill starts again. Raises RuntimeError naming
        missing, unexpected and different tensors, and stays in sync.
        """
        self._require(EngineState.SYNCING, call="finish_sync")
        self._require_delivered(manifest)
        self.weight_version = manifest.version
        self._lacks_weights = False
        self._num_syncs += 1
        self.state = EngineState.AWAKE
        again = self._to_compute_again()
        self._take_back(again)
        self._hand_over(again)

    def stats(self) -> EngineStats:
        """A snapshot; counters run since the engine was made."""
        num_running = self._num_running()
        return EngineStats(
            num_running=num_running,
            num_waiting=len(self._sequences) - num_running,
            kv_cache_usage=float(self._scheduler.kv_cache_manager.usage),
            weight_bytes=self._weight_bytes,
            num_preemptions=self._counters.num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_steps=self._num_steps,
            busy_s=self._busy_s,
            num_first_tokens=self._num_first_tokens,
        )

    def _hand_over(self, sequences: Iterable[Sequence]) -> None:
        """Send sequences to vLLM, with their known tokens."""
        for sequence in list(sequences):
            key = str(next(self._handed_over))
            prompt: dict[str, Any] = {"prompt_token_ids": list(sequence.token_ids)}
            if self._caches_prefixes:
                # Part of a cached block's name: what older weights computed is not found any more.
                prompt["cache_salt"] = str(self._num_syncs)
            own_key = self._llm.add_request(
                key,
                prompt,
                self._sampling_params(sequence),
                arrival_time=float(sequence.arrival),
                priority=sequence.request.priority,
            )
            self._keys[sequence.request.id] = key
            self._by_key[key] = sequence
            if self._routes is not None:
                self._routes.begin(key, own_key)
            sequence.is_decoding = False

    def _sampling_params(self, sequence: Sequence) -> Any:
        params = sequence.request.sampling
        return self._vllm.SamplingParams(
            max_tokens=sequence.num_left,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            seed=_seed(params.seed, len(sequence.logprobs)),
            # Stop strings are watched for here, and end-of-sequence ids are stop ids.
            stop_token_ids=sorted(sequence.stop_ids),
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA,
        )

    def _take_back(self, sequences: Iterable[Sequence]) -> None:
        keys = [self._keys.pop(s.request.id) for s in sequences if s.request.id in self._keys]
        for key in keys:
            sequence = self._by_key.pop(key)
            if self._routes is not None:
                self._routes.take(key, sequence)
        self._withdraw(keys)

    def _withdraw(self, keys: Iterable[str]) -> None:
        """One by one: vLLM frees the blocks of several in an order that differs between ranks, and
        they would later find different prefixes in their caches."""
        for key in keys:
            self._llm.abort_request([key])

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request.id]
        del self._by_key[self._keys.pop(sequence.request.id)]

    def _append(self, sequence: Sequence, output: Any) -> StopReason | None:
        """Append the tokens that vLLM has sampled to a sequence, up to one that ends it."""
        [sampled] = output.outputs
        if sequence.num_cached_tokens < 0 and sampled.token_ids:
            num_prompt = len(sequence.request.prompt_ids)
            sequence.num_cached_tokens = min(output.num_cached_tokens or 0, num_prompt)
            self._num_prompt_tokens += num_prompt
            self._num_cached_tokens += sequence.num_cached_tokens
            self._num_first_tokens += not sequence.logprobs
        for token_id, found in zip(sampled.token_ids, sampled.logprobs or (), strict=True):
            logprob = float(found[token_id].logprob)
            reason = sequence.append(int(token_id), logprob, self.weight_version)
            sequence.is_decoding = True
            self._num_generated_tokens += 1
            if reason is not None:
                return reason
        return None

    @property
    def _scheduler(self) -> Any:
        return self._llm.engine_core.engine_core.scheduler

    def _num_running(self) -> int:
        return len(self._scheduler.running)

    def _to_compute_again(self) -> list[Sequence]:
        """Sequences that vLLM must be given anew when weights have changed: those whose prefill is
        not through and, where prefixes are cached, those without keys and values, not admitted yet
        or preempted, which would look for them under the old weights' name."""
        # vLLM's internal name for a request begins with hone's name.
        running = {str(r.request_id).partition("-")[0] for r in self._scheduler.running}
        return [
            sequence
            for name, sequence in self._sequences.items()
            if (
                not sequence.is_decoding
                if self._keys.get(name) in running
                else self._caches_prefixes
            )
        ]

    def _eagerly(self) -> AbstractContextManager[Any]:
        """Context without torch.compile on a CPU, where compiling vLLM's small helpers takes
        seconds and saves nothing."""
        return torch.compiler.set_stance("force_eager") if self._on_cpu else nullcontext()

    def _wake_all(self) -> None:
        """Wake vLLM on every rank, or raise RuntimeError on every rank."""
        is_awake = False
        try:
            self._llm.wake_up()
            is_awake = True
        finally:
            are_awake = self._tensor_parallel.smallest(is_awake)
        if not are_awake:
            raise RuntimeError("another rank could not wake, and says why")

    @torch.no_grad()
    def _adopt(self, model: PreTrainedModel) -> None:
        """Take the weights of `model` as version 0. Raises RuntimeError where they do not match."""
        targets = dict(self.named_weights())
        parts = {name: self.shard(name, whole) for name, whole in export_weights(model)}
        if diff := match_layout({name: part.shape for name, part in parts.items()}, targets):
            raise RuntimeError(f"vLLM does not hold the weights of this model: {diff.describe()}")
        self.write({name: (targets[name], part) for name, part in parts.items()})
        self.finish_sync(build_manifest(parts.items(), 0))

    def _require(self, *states: EngineState, call: str, hint: str = "") -> None:
        if self.state is EngineState.SYNCING and self._lacks_weights:
            hint = " and has no weights yet, or none since it slept: deliver them by a sync"
        super()._require(*states, call=call, hint=hint)


@dataclass(slots=True)
class _Counters:
    """Replaces vLLM's loggers, which `LLMEngine.step` calls with each step's statistics."""

    num_preemptions: int = 0

    def record(self, *, iteration_stats: Any, **others: Any) -> None:
        if iteration_stats is not None:
            self.num_preemptions += iteration_stats.num_preempted_reqs

    def record_sleep_state(self, *state: Any) -> None:
        """Ignore the calls of `sleep` and `wake_up`, whose state the engine tracks itself."""

    def log(self) -> None:
        """Log nothing; vLLM calls this every ten seconds."""


def _seed(seed: int, num_sampled: int) -> int:
    """Seed of vLLM's generator for a request that goes on after `num_sampled` tokens.

    Each continuation has a stream of its own: the first draw again would favour the token that it
    gave at the beginning.
    """
    digest = blake2b(f"{seed}/{num_sampled}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _check_temperature(request: Request) -> None:
    """Raise ValueError for one that vLLM would raise, and sample from another distribution."""
    temperature = request.sampling.temperature
    if 0 < temperature < LOWEST_TEMPERATURE:
        raise ValueError(
            f"request {request.id!r} has temperature={temperature}; vLLM samples at 0 (greedy), or "
            f"{LOWEST_TEMPERATURE} or more"
        )
