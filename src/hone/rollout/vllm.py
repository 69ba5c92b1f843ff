"""vLLM behind the `Engine` protocol, in this process.

engine = VLLMEngine(model, EngineConfig(backend="vllm"), eos_token_ids=(2,))
engine.submit([Request(id="a", prompt_ids=(5, 6), sampling=SamplingParams(max_tokens=8))])
while engine.has_unfinished:
    completions = engine.step()

vLLM schedules, computes and draws. Which token ends a request, its versions, and which weights
arrived are decided here, by the code of the embedded engine, so that both engines mean the same.

vLLM holds weights of its own, with queries, keys and values of a layer in one tensor, gates and ups
in another. `named_weights` are views into those under Hugging Face names: a sync writes into them,
and what it proves is what the kernels read.
"""

from __future__ import annotations

import copy
import importlib
import os
import tempfile
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from hashlib import blake2b
from itertools import count
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hone.checkpoint.random_state import capture_random_state, restore_random_state
from hone.config.engine import EngineConfig
from hone.config.errors import UserError
from hone.config.extras import import_extra
from hone.engine.detokenizer import StopStringWatcher
from hone.engine.engine import EngineState
from hone.engine.kv_cache import KVCache
from hone.engine.requests import check_request
from hone.engine.sequence import Sequence
from hone.models.manifest import build_manifest, compare, export_weights
from hone.models.support import context_length
from hone.types import Completion, EngineStats, Request, StopReason, WeightManifest
from hone.weights.sync import deliver, match_layout

__all__ = ["OLDEST", "TOO_NEW", "VLLMEngine"]

OLDEST, TOO_NEW = (0, 24), (0, 33)
"""Versions of vLLM that are served: from the first, below the second."""

_LOWEST_TEMPERATURE = 0.01
"""vLLM raises lower ones to this, and would then sample from another distribution."""
_CPU_BLOCK_TOKENS = 128
_CPU_DEFAULT_BYTES = 1 << 30
_OPTIONS = (
    "async_scheduling",
    "enable_sleep_mode",
    "generation_config",
    "kv_cache_memory_bytes",
    "logprobs_mode",
    "scheduling_policy",
)
_METHODS = ("abort_request", "add_request", "apply_model", "sleep", "step", "wake_up")


class VLLMEngine:
    """The `Engine` protocol over vLLM, with a copy of the weights of `model`.

    `model` gives architecture, dtype and, unless it lies on the meta device, the first weights, as
    version 0; it is not used afterwards. One on the meta device needs `device`, and its engine a
    sync before it samples. `eos_token_ids` end every request that does not ignore them; `tokenizer`
    serves stop strings alone. `max_model_len`, in tokens, overrides the configured one.

    With `engine.enable_sleep` on a GPU, `sleep` frees the KV cache and, at `sleep_level` 1, moves
    the weights to the host; at level 2 they are dropped, and `wake` leaves the engine in sync: only
    `begin_sync`, a delivery and `finish_sync` let it sample again. On a CPU vLLM frees nothing.

    Draws are from the same distributions as the embedded engine's, but other draws. A sequence that
    is resumed, or that runs out of cache and is queued again, draws differently from there on than
    one that is not. In a process group of several, all make an engine together, one each.

    After an exception out of vLLM itself the engine is in no known state: make it anew. Raises
    UserError where vLLM is not installed, of a version that is not served, or cannot serve the
    model; ValueError where `max_model_len` exceeds the model's context.
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
    ) -> None:
        device = device or model.device
        self.max_model_len = max_model_len or cfg.max_model_len or context_length(model.config)
        _check(model.config, cfg, device, self.max_model_len)
        self._vllm = _import_vllm(device)
        if device.type == "cpu":
            _check_head_dim(model.config)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._tokenizer = tokenizer
        self._vocab_size = int(model.config.vocab_size)
        self._is_tied = bool(getattr(model.config, "tie_word_embeddings", False))
        self._caches_prefixes = cfg.enable_prefix_caching
        self._sleep_level = cfg.sleep_level
        self._frees_memory = cfg.enable_sleep
        self._on_cpu = device.type == "cpu"
        options = _options(model, cfg, device, self.max_model_len)
        self._llm = _make(self._vllm, model.config, options, on_cpu=self._on_cpu)
        self._model: nn.Module = self._llm.apply_model(lambda module: module)[0]
        if self._on_cpu:
            _check_reads_weights(self._model)
        self._counters = _Counters()
        self._llm.logger_manager = self._counters
        self.state = EngineState.SYNCING
        self._lacks_weights = True
        self._sequences: dict[str, Sequence] = {}
        self._keys: dict[str, str] = {}
        """Name at vLLM of each request: one that is handed over anew gets another."""
        self._by_key: dict[str, Sequence] = {}
        self._arrivals, self._handed_over = count(), count()
        self._weight_version = 0
        self._num_syncs = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_generated_tokens = 0
        self._num_first_tokens = 0
        self._num_steps = 0
        self._busy_s = 0.0
        if model.device.type != "meta":
            self._adopt(model)

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

        Raises ValueError for one that can never fit, is malformed, has a temperature that vLLM does
        not serve, or reuses an unfinished id.
        """
        added: dict[str, Sequence] = {}
        for request in requests:
            if request.id in self._sequences or request.id in added:
                raise ValueError(f"request id {request.id!r} is already in use")
            added[request.id] = self._sequence(request)
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
        self._llm.abort_request(excess)
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
        """Free the KV cache, and the weights as `sleep_level` says; queued requests stay.

        Raises RuntimeError while sequences run or the engine is not awake.
        """
        self._require(EngineState.AWAKE, call="sleep")
        if running := self._num_running():
            raise RuntimeError(f"sleep() while {running} sequences run; finish or abort them first")
        self._take_back(self._sequences.values())
        if self._frees_memory:
            self._llm.sleep(self._sleep_level)
        self._lacks_weights = self._frees_memory and self._sleep_level == 2
        self.state = EngineState.ASLEEP

    def wake(self) -> None:
        """Allocate again what `sleep` has freed.

        At level 2 the weights are lost: the engine is then in sync, and samples after
        `finish_sync`.
        """
        self._require(EngineState.ASLEEP, call="wake")
        if self._frees_memory:
            self._llm.wake_up()
        self.state = EngineState.SYNCING if self._lacks_weights else EngineState.AWAKE
        self._hand_over(self._sequences.values())

    def begin_sync(self) -> None:
        """Refuse to sample until `finish_sync` has confirmed a manifest.

        Running sequences keep their keys and values. Legal again after a delivery that failed.
        """
        self._require(EngineState.AWAKE, EngineState.SYNCING, call="begin_sync")
        self.state = EngineState.SYNCING

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that vLLM computes with: views into its tensors, tied ones by each name."""
        packed: Mapping[str, Seq[str]] = getattr(self._model, "packed_modules_mapping", {})
        head = embedding = None
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            path, _, leaf = name.rpartition(".")
            parent, _, last = path.rpartition(".")
            module, tensor = self._model.get_submodule(path), parameter.detach()
            if last in packed:
                pieces = tensor.split(_partition_sizes(module))
                for part, piece in zip(packed[last], pieces, strict=True):
                    yield f"{parent}.{part}.{leaf}", piece
                continue
            if hasattr(module, "org_vocab_size"):  # the rows beyond it are padding
                tensor = tensor[: self._vocab_size]
                head = tensor if last == "lm_head" else head
                embedding = tensor if last == "embed_tokens" else embedding
            yield name, tensor
        if self._is_tied and head is None and embedding is not None:
            yield "lm_head.weight", embedding  # a model class that has no head of its own

    def shard(self, name: str, tensor: Tensor) -> Tensor:
        """The whole weight: there is no tensor parallelism."""
        return tensor

    def finish_sync(self, manifest: WeightManifest) -> None:
        """Compare what vLLM computes with to the manifest, and adopt its version.

        From then on no prefix cached under older weights is used, except by the sequences that are
        running, which go on with the keys and values they have. Raises RuntimeError naming missing,
        unexpected and different tensors, and stays in sync.
        """
        self._require(EngineState.SYNCING, call="finish_sync")
        if diff := compare(manifest, build_manifest(self.named_weights(), manifest.version)):
            raise RuntimeError(
                f"weight sync to version {manifest.version} is incomplete: {diff.describe()}"
            )
        self._weight_version = manifest.version
        self._lacks_weights = False
        self._num_syncs += 1
        self.state = EngineState.AWAKE
        if self._caches_prefixes:
            waiting = self._waiting()
            self._take_back(waiting)
            self._hand_over(waiting)

    def stats(self) -> EngineStats:
        """A snapshot; counters run since the engine was made."""
        num_running = self._num_running()
        return EngineStats(
            num_running=num_running,
            num_waiting=len(self._sequences) - num_running,
            kv_cache_usage=self._counters.kv_cache_usage if self._sequences else 0.0,
            num_preemptions=self._counters.num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_steps=self._num_steps,
            busy_s=self._busy_s,
            num_first_tokens=self._num_first_tokens,
            num_drafted_tokens=0,
            num_accepted_tokens=0,
        )

    def _sequence(self, request: Request) -> Sequence:
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
        if 0 < params.temperature < _LOWEST_TEMPERATURE:
            raise ValueError(
                f"request {request.id!r} has temperature={params.temperature}; vLLM samples at 0 "
                f"(greedy), or {_LOWEST_TEMPERATURE} or more"
            )
        watcher = None
        if params.stop and not params.ignore_eos and self._tokenizer is not None:
            watcher = StopStringWatcher(self._tokenizer, params.stop)
        return Sequence(
            request=request, arrival=next(self._arrivals), stop_ids=stop_ids, watcher=watcher
        )

    def _hand_over(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences at vLLM, as far as their tokens are known."""
        for sequence in list(sequences):
            key = str(next(self._handed_over))
            prompt: dict[str, Any] = {"prompt_token_ids": list(sequence.token_ids)}
            if self._caches_prefixes:
                # Part of a cached block's name: what older weights computed is not found any more.
                prompt["cache_salt"] = str(self._num_syncs)
            self._llm.add_request(
                key,
                prompt,
                self._sampling_params(sequence),
                arrival_time=float(sequence.arrival),
                priority=sequence.request.priority,
            )
            self._keys[sequence.request.id] = key
            self._by_key[key] = sequence

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
            del self._by_key[key]
        self._llm.abort_request(keys)

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request.id]
        del self._by_key[self._keys.pop(sequence.request.id)]

    def _append(self, sequence: Sequence, output: Any) -> StopReason | None:
        """Give a sequence what vLLM has sampled, up to a token that ends it."""
        [sampled] = output.outputs
        if sequence.num_cached_tokens < 0 and sampled.token_ids:
            num_prompt = len(sequence.request.prompt_ids)
            sequence.num_cached_tokens = min(output.num_cached_tokens or 0, num_prompt)
            self._num_prompt_tokens += len(sequence.token_ids)
            self._num_cached_tokens += output.num_cached_tokens or 0
            self._num_first_tokens += not sequence.logprobs
        for token_id, found in zip(sampled.token_ids, sampled.logprobs or (), strict=True):
            logprob = float(found[token_id].logprob)
            reason = sequence.append(int(token_id), logprob, self._weight_version)
            self._num_generated_tokens += 1
            if reason is not None:
                return reason
        return None

    def _scheduled(self) -> list[Any]:
        return self._llm.engine_core.engine_core.scheduler.running

    def _num_running(self) -> int:
        return len(self._scheduled())

    def _waiting(self) -> list[Sequence]:
        """Sequences without keys and values: not admitted yet, or preempted."""
        # Of vLLM's own name for a request, ours is the beginning.
        running = {str(r.request_id).partition("-")[0] for r in self._scheduled()}
        return [s for name, s in self._sequences.items() if self._keys.get(name) not in running]

    def _eagerly(self) -> AbstractContextManager[Any]:
        """On a CPU, compiling vLLM's little helpers takes seconds and makes nothing faster."""
        return torch.compiler.set_stance("force_eager") if self._on_cpu else nullcontext()

    @torch.no_grad()
    def _adopt(self, model: PreTrainedModel) -> None:
        """Take the weights of `model` as version 0. Raises RuntimeError where they do not match."""
        targets, sources = dict(self.named_weights()), dict(export_weights(model))
        if diff := match_layout({name: s.shape for name, s in sources.items()}, targets):
            raise RuntimeError(f"vLLM does not hold the weights of this model: {diff.describe()}")
        deliver([(targets[name], source) for name, source in sources.items()])
        self.finish_sync(build_manifest(export_weights(model), 0))

    def _require(self, *states: EngineState, call: str) -> None:
        if self.state in states:
            return
        hint = ""
        if self.state is EngineState.SYNCING and self._lacks_weights:
            hint = " and has no weights yet, or none since it slept: deliver them by a sync"
        raise RuntimeError(
            f"{call}() needs an engine that is {' or '.join(states)}; this one is "
            f"{self.state}{hint}"
        )


@dataclass(slots=True)
class _Counters:
    """Stands where vLLM keeps its loggers, which `LLMEngine.step` tells of each step."""

    num_preemptions: int = 0
    kv_cache_usage: float = 0.0

    def record(self, *, scheduler_stats: Any, iteration_stats: Any, **others: Any) -> None:
        self.kv_cache_usage = float(scheduler_stats.kv_cache_usage)
        if iteration_stats is not None:
            self.num_preemptions += iteration_stats.num_preempted_reqs

    def record_sleep_state(self, *state: Any) -> None:
        """Told by `sleep` and `wake_up`; known already."""

    def log(self) -> None:
        """Called every ten seconds; there is nothing to say."""


def _partition_sizes(module: Any) -> list[int]:
    """Rows of each weight in the one that a fused layer holds."""
    return list(module.output_partition_sizes)


def _seed(seed: int, num_sampled: int) -> int:
    """Seed of vLLM's generator for a request that goes on after `num_sampled` tokens.

    Each continuation has a stream of its own: the first draw again would favour the token that it
    gave at the beginning.
    """
    digest = blake2b(f"{seed}/{num_sampled}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _check(
    config: PreTrainedConfig, cfg: EngineConfig, device: torch.device, max_model_len: int
) -> None:
    if max_model_len > context_length(config):
        raise ValueError(
            f"engine.max_model_len={max_model_len} exceeds the model's context length of "
            f"{context_length(config)} tokens"
        )
    if cfg.tensor_parallel_size > 1:
        raise UserError(
            f"engine.tensor_parallel_size is {cfg.tensor_parallel_size}; with engine.backend vllm "
            "an engine uses one device, so that its weights can be proven in this process. Set it "
            "to 1, or engine.backend to embedded."
        )
    if device.type == "cuda" and (device.index or 0) != 0 and not _is_one_of_several():
        raise UserError(
            f"vLLM takes the first GPU that this process sees, got {device}: set "
            f"CUDA_VISIBLE_DEVICES={device.index} and use cuda:0"
        )


def _is_one_of_several() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _import_vllm(device: torch.device) -> Any:
    """The package, with the settings that must stand before it is imported.

    Raises UserError where it is missing or of another version, naming those that are served.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine computes in this process
    defaults = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it knows no seeds of requests
    }
    if device.type == "cpu":
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the trainer's threads are bound to none
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    package = "vllm-cpu" if device.type == "cpu" else "vllm"
    vllm = import_extra("vllm", install=package, needed_by="engine.backend=vllm")
    found = str(vllm.__version__)
    served = f"{'.'.join(map(str, OLDEST))} or more, below {'.'.join(map(str, TOO_NEW))}"
    if not OLDEST <= _numbers(found) < TOO_NEW:
        raise UserError(
            f"engine.backend=vllm serves vLLM {served}; installed is {found}. Install one of "
            "those, or set engine.backend=embedded."
        )
    known = {option.name for option in fields(vllm.EngineArgs)}
    lacking = [name for name in _OPTIONS if name not in known]
    lacking += [name for name in _METHODS if not hasattr(vllm.LLMEngine, name)]
    if lacking:
        raise UserError(
            f"this build of vLLM ({found}) lacks {', '.join(lacking)}; install one of {served}"
        )
    importlib.import_module("vllm.sampling_params")
    return vllm


def _check_head_dim(config: PreTrainedConfig) -> None:
    """Raise UserError where vLLM's attention on a CPU would fail in the first step."""
    module: Any = importlib.import_module("vllm.v1.attention.backends.cpu_attn")
    served: list[int] = module.CPUAttentionBackend.get_supported_head_sizes()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim not in served:
        raise UserError(
            f"the model's head_dim is {head_dim}; on a CPU vLLM serves "
            f"{', '.join(map(str, served))}. Set engine.backend=embedded."
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor number; nothing where it has none (a build from source without tags)."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else ()


def _options(
    model: PreTrainedModel, cfg: EngineConfig, device: torch.device, max_model_len: int
) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs`, all but the folder of the model."""
    options: dict[str, Any] = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "load_format": "dummy",  # a sync fills it
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "max_model_len": max_model_len,
        "max_num_seqs": cfg.max_num_seqs,
        "max_num_batched_tokens": cfg.max_num_batched_tokens,
        "enable_prefix_caching": cfg.enable_prefix_caching,
        "enforce_eager": not cfg.cuda_graphs or device.type == "cpu",
        "logprobs_mode": "processed_logprobs",  # of the distribution that is drawn from
        "scheduling_policy": "priority",
        # A step in flight would end under other weights than it began with.
        "async_scheduling": False,
        "disable_log_stats": False,
        "seed": 0,
    }
    if device.type == "cuda":
        options["enable_sleep_mode"] = cfg.enable_sleep
        options["gpu_memory_utilization"] = cfg.gpu_memory_utilization
        if cfg.kv_cache_gib is not None:
            options["kv_cache_memory_bytes"] = int(cfg.kv_cache_gib * 2**30)
    else:
        options["kv_cache_memory_bytes"] = _cpu_cache_bytes(model, cfg, max_model_len)
    if _is_one_of_several():  # else vLLM would start a process group where there is one
        options["distributed_executor_backend"] = "external_launcher"
    return options


def _cpu_cache_bytes(model: PreTrainedModel, cfg: EngineConfig, max_model_len: int) -> int:
    """As configured; else what `max_num_seqs` sequences of full length need, at most 1 GiB."""
    if cfg.kv_cache_gib is not None:
        return int(cfg.kv_cache_gib * 2**30)
    cache = KVCache(
        model.config,
        block_size=_CPU_BLOCK_TOKENS,
        dtype=model.dtype,
        device=torch.device("cpu"),
    )
    # One more is kept free, for padding.
    one = -(-max_model_len // _CPU_BLOCK_TOKENS) * cache.block_bytes
    return max(min(cfg.max_num_seqs * one, _CPU_DEFAULT_BYTES), one) + cache.block_bytes


def _make(vllm: Any, config: PreTrainedConfig, options: dict[str, Any], *, on_cpu: bool) -> Any:
    """A vLLM engine with weights of no meaning. Raises UserError where vLLM refuses."""
    config = copy.deepcopy(config)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    with tempfile.TemporaryDirectory() as folder, _process_kept():
        config.save_pretrained(folder)
        try:
            with _unpacked_weights() if on_cpu else nullcontext():
                llm = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(model=folder, **options))
        except ValueError as error:
            raise UserError(f"vLLM refuses this model or these settings: {error}") from error
    # When it is collected, vLLM would destroy the process groups of this process, whosever they
    # are. Memory is given back without that.
    if finalizer := getattr(llm.engine_core, "_finalizer", None):
        finalizer.detach()
    return llm


@contextmanager
def _process_kept() -> Generator[None]:
    """Undo what vLLM changes in a process that it takes for its own: random states, the precision
    of float32 products, variables that tell of torchrun and what to preload, and on a CPU torch's
    way to set the number of threads."""
    set_num_threads, before = torch.set_num_threads, dict(os.environ)
    precision = torch.get_float32_matmul_precision()
    random_state = capture_random_state()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_float32_matmul_precision(precision)
        restore_random_state(random_state)
        for name in {name for name in os.environ.keys() | before if not name.startswith("VLLM_")}:
            if name not in before:
                del os.environ[name]
            elif os.environ.get(name) != before[name]:
                os.environ[name] = before[name]


@contextmanager
def _unpacked_weights() -> Generator[None]:
    """Inside, vLLM's linear layers on a CPU keep their weights as they are.

    Else each packs a copy in a layout of its own and drops the weight; new values would not reach
    the copy of a tied output head, and nobody would notice.
    """
    utils: Any = importlib.import_module("vllm.model_executor.layers.utils")
    pack: Callable[..., None] = utils.dispatch_cpu_unquantized_gemm

    def keep(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = F.linear

    utils.dispatch_cpu_unquantized_gemm = keep
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = pack


def _check_reads_weights(model: nn.Module) -> None:
    """Raise RuntimeError where a linear layer computes with a packed copy of its weight."""
    packed = [
        name
        for name, module in model.named_modules()
        if getattr(module, "cpu_linear", F.linear) is not F.linear
    ]
    if packed:
        raise RuntimeError(
            f"vLLM computes with packed copies of the weights of {', '.join(packed[:8])}, which a "
            "sync does not reach; this version of vLLM cannot be served on a CPU"
        )
