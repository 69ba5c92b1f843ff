"""Making a vLLM engine in this process, or this process's rank of one.

vLLM assumes that it has the process for itself. Settings that it needs are set before its import,
and its changes to the process are undone once the engine is made.

A rank of several is made as vLLM's "external launcher" has it: in the process group that is there,
with a scheduler of its own. All ranks schedule the same, given the same calls.
"""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hone.checkpoint.random_state import capture_random_state, restore_random_state
from hone.engine.kv_cache import KVCache
from hone.engine.settings import EngineConfig
from hone.engine.vllm.facts import VERSIONS, is_served
from hone.engine.vllm.weights import unpacked_weights
from hone.errors import UserError
from hone.extras import import_extra
from hone.families.registry import spec_of
from hone.models.support import head_dim_of
from hone.models.tensor_parallel import TensorParallel
from hone.observe.disk import TEMPORARY, temporary_directory, writing

__all__ = ["import_vllm", "make_vllm"]

_CPU_BLOCK_TOKENS = 128
_CPU_DEFAULT_BYTES = 1 << 30
_OPTIONS = (
    "async_scheduling",
    "distributed_executor_backend",
    "enable_expert_parallel",
    "enable_return_routed_experts",
    "enable_sleep_mode",
    "generation_config",
    "kv_cache_memory_bytes",
    "logprobs_mode",
    "moe_backend",
    "scheduling_policy",
    "tensor_parallel_size",
)
_METHODS = ("abort_request", "add_request", "apply_model", "sleep", "step", "wake_up")


def make_vllm(
    model: PreTrainedModel,
    cfg: EngineConfig,
    *,
    device: torch.device,
    max_model_len: int,
    tp: TensorParallel,
    records_routes: bool = False,
) -> tuple[Any, Any]:
    """The package, and a `vllm.LLMEngine` on `device` with weights of no meaning.

    Of `model` architecture and dtype are used. Raises UserError where vLLM is not installed or
    cannot serve the model.
    """
    if device.type == "cuda" and (device.index or 0) != 0 and not _is_one_of_several():
        raise UserError(
            f"vLLM takes the first GPU that this process sees, got {device}: set "
            f"CUDA_VISIBLE_DEVICES={device.index} and use cuda:0"
        )
    vllm = import_vllm(device)
    if device.type == "cpu":
        _check_head_dim(model.config)
        _check_no_experts(model.config)
    options = _options(model, cfg, device, max_model_len, tp)
    options["enable_return_routed_experts"] = records_routes
    return vllm, _make(vllm, model.config, options, on_cpu=device.type == "cpu")


def _is_one_of_several() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def import_vllm(device: torch.device) -> Any:
    """The package, with the settings that must stand before it is imported.

    Raises UserError where it is missing or lacks what engines need.
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
    vllm = import_extra("vllm", needed_by="engine.backend=vllm", on_cpu=device.type == "cpu")
    found = str(vllm.__version__)
    assert is_served(found), f"{found=}"  # a rule of `hone check`
    known = {option.name for option in fields(vllm.EngineArgs)}
    lacking = [name for name in _OPTIONS if name not in known]
    lacking += [name for name in _METHODS if not hasattr(vllm.LLMEngine, name)]
    if lacking:
        raise UserError(
            f"this build of vLLM ({found}) lacks {', '.join(lacking)}; install one {VERSIONS} from "
            "a release"
        )
    importlib.import_module("vllm.sampling_params")
    return vllm


def _check_head_dim(config: PreTrainedConfig) -> None:
    """Raise UserError where vLLM's attention on a CPU would fail in the first step."""
    module: Any = importlib.import_module("vllm.v1.attention.backends.cpu_attn")
    served: list[int] = module.CPUAttentionBackend.get_supported_head_sizes()
    head_dim = head_dim_of(config)
    if head_dim not in served:
        raise UserError(
            f"the model's head_dim is {head_dim}; on a CPU vLLM serves "
            f"{', '.join(map(str, served))}. Set engine.backend=embedded."
        )


def _has_experts(config: PreTrainedConfig) -> bool:
    return spec_of(config.model_type).experts is not None


def _check_no_experts(config: PreTrainedConfig) -> None:
    """Raise UserError where vLLM would compute with copies that a sync does not reach."""
    if _has_experts(config):
        raise UserError(
            f"the model ({config.model_type}) has experts, whose weights vLLM packs on a CPU. Set "
            "engine.backend=embedded."
        )


def _options(
    model: PreTrainedModel,
    cfg: EngineConfig,
    device: torch.device,
    max_model_len: int,
    tp: TensorParallel,
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
        "enforce_eager": cfg.enforce_eager or device.type == "cpu",
        "logprobs_mode": "processed_logprobs",  # of the distribution that is drawn from
        "scheduling_policy": "priority",
        # A step in flight would end under other weights than it began with.
        "async_scheduling": False,
        "disable_log_stats": False,
        "seed": 0,
        "tensor_parallel_size": tp.size,
        # Ranks of a mixture of experts hold whole experts, as those of the embedded engine do.
        "enable_expert_parallel": tp.size > 1 and _has_experts(model.config),
    }
    if device.type == "cuda":
        if _has_experts(model.config):
            options["moe_backend"] = "triton"  # others arrange weights in ways of their own
        options["enable_sleep_mode"] = cfg.enable_sleep
        options["gpu_memory_utilization"] = cfg.gpu_memory_utilization
        if cfg.kv_cache_gib is not None:
            options["kv_cache_memory_bytes"] = int(cfg.kv_cache_gib * 2**30)
    else:
        options["kv_cache_memory_bytes"] = _cpu_cache_bytes(model, cfg, max_model_len, tp)
    if _is_one_of_several():  # else vLLM would start a process group where there is one
        options["distributed_executor_backend"] = "external_launcher"
    return options


def _cpu_cache_bytes(
    model: PreTrainedModel, cfg: EngineConfig, max_model_len: int, tp: TensorParallel
) -> int:
    """The configured size of the cache; by default enough for `max_num_seqs` sequences of full
    length, at most 1 GiB."""
    if cfg.kv_cache_gib is not None:
        return int(cfg.kv_cache_gib * 2**30)
    cache = KVCache(
        model.config,
        block_size=_CPU_BLOCK_TOKENS,
        dtype=model.dtype,
        device=torch.device("cpu"),
    )
    num_kv_heads = int(model.config.num_key_value_heads)
    block_bytes = cache.block_bytes // num_kv_heads * max(num_kv_heads // tp.size, 1)
    # One more is kept free, for padding.
    one = -(-max_model_len // _CPU_BLOCK_TOKENS) * block_bytes
    return max(min(cfg.max_num_seqs * one, _CPU_DEFAULT_BYTES), one) + block_bytes


def _make(vllm: Any, config: PreTrainedConfig, options: dict[str, Any], *, on_cpu: bool) -> Any:
    """A vLLM engine with weights of no meaning. Raises UserError where vLLM refuses."""
    config = copy.deepcopy(config)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_directory("hone-vllm-"))
        stack.enter_context(_process_kept())
        if on_cpu:
            stack.enter_context(unpacked_weights())
            stack.enter_context(_sums_over_gloo())
        with writing(Path(folder), TEMPORARY):
            config.save_pretrained(folder)
        try:
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
def _sums_over_gloo() -> Generator[None]:
    """Context in which ranks on a CPU add up over their process group.

    vLLM's shared memory for it has the same name for every engine of a host whose ranks somebody
    else has started, and outlives a rank that is killed.
    """
    module: Any = importlib.import_module("vllm.distributed.device_communicators.cpu_communicator")
    name = "_all_group_ranks_share_shm_group_name"
    agree = getattr(module.CpuCommunicator, name)
    setattr(module.CpuCommunicator, name, lambda communicator: False)
    try:
        yield
    finally:
        setattr(module.CpuCommunicator, name, agree)
