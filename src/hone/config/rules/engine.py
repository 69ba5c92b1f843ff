"""Rules on engines: concurrency, memory, tensor parallelism, exact mode, vLLM."""

from __future__ import annotations

from hone.config.rules.facts import DECODED, DIVIDED, FUSED
from hone.config.rules.rule import error, excludes, needs, unused, warning
from hone.config.vllm import LOWEST_TEMPERATURE, VERSIONS, VLLM_EXPERTS
from hone.families.model_facts import EXACT_ALIGNMENT, EXACT_HEAD_DIMS

__all__ = ["RULES"]

_RUNS = ("rl", "eval", "generate")
_SIZE, _BACKEND, _VLLM = "engine.tensor_parallel_size", "engine.backend", "engine.backend = vllm"
_SMALL_BATCHED_TOKENS = 2048
_EXACT_RUNS = (*_RUNS, "bench engine", "bench train")

_ENGINE = (
    warning("engine.max_num_seqs < sampling.n_samples_per_prompt",
            why="the samples of a prompt cannot all run at once",
            fix="raise engine.max_num_seqs"),
    warning("engine.max_num_seqs > @samples_per_step", given=("engine.max_num_seqs is set",),
            why="the rest is not used",
            fix="engine.max_num_seqs = {samples_per_step}"),
    warning("engine.max_num_batched_tokens < engine.max_num_seqs",
            given=(f"{_BACKEND} = embedded",),
            why="a decode step takes one token of each running sequence, so that only so many can "
            "run",
            fix="raise engine.max_num_batched_tokens"),
    warning(f"engine.max_num_batched_tokens < {_SMALL_BATCHED_TOKENS}", "run.device = cuda",
            given=("engine.max_num_batched_tokens >= engine.max_num_seqs",),
            why="prompts are prefilled in chunks too small to fill a GPU",
            fix=f"engine.max_num_batched_tokens = {_SMALL_BATCHED_TOKENS} | more"),
    warning("engine.enable_prefix_caching", "rollout.n_samples_per_prompt = 1",
            why="it shares prompts within a group, and helps otherwise only where prompts begin "
            "alike",
            fix="engine.enable_prefix_caching = false | raise rollout.n_samples_per_prompt"),
    warning("not engine.enable_prefix_caching", "sampling.n_samples_per_prompt > 1",
            why="each prompt is prefilled once for each sample",
            fix="engine.enable_prefix_caching = true"),
    unused("engine.enable_sleep", only=("eval", "generate", "bench engine"),
           why="it frees the KV cache while a trainer works, and nothing trains here"),
    warning("engine.gpu_memory_utilization > 0.8", "engine.kv_cache_gib = unset", only=("rl",),
            given=("not @is_apart", "not engine.enable_sleep"),
            why="the trainer needs the same GPU for gradients, optimizer and activations",
            fix="engine.gpu_memory_utilization = 0.5 | set engine.kv_cache_gib"),
    unused("engine.gpu_memory_utilization", "engine.kv_cache_gib",
           why="that is used instead", instead="remove engine.kv_cache_gib"),
    unused("engine.gpu_memory_utilization", "run.device = cpu",
           given=("engine.kv_cache_gib = unset",),
           why="there engine.kv_cache_gib says how large the cache is"),
    error("@kv_cache_gib < @sequence_gib",
          why="it must hold one",
          fix="raise engine.kv_cache_gib | shorten sequences"),
    error("engine.kv_cache_dtype = fp8", "@lacks_fp8",
          says="engine.kv_cache_dtype is fp8, and the GPU of run.device is {gpu}",
          why="it has no eight-bit floats", fix="engine.kv_cache_dtype = auto"),
    error("engine.weight_dtype = int8", "not @has_fused_layers", given=(f"{_BACKEND} = embedded",),
          says="engine.weight_dtype is int8, and {the_model} is of the family {family}",
          why=f"only {DECODED} have products of such weights", fix="engine.weight_dtype = auto"),
    error("engine.weight_dtype = int8", "@broken_rows", given=(f"{_BACKEND} = embedded",),
          says="engine.weight_dtype is int8, and a matrix of {the_model} has rows of {broken_rows}",
          why="its rows are multiples of 16 values, on each device",
          fix="engine.weight_dtype = auto"),
    warning("engine.weight_dtype = int8", "@uncut_matrix", given=(f"{_BACKEND} = embedded",),
            says="engine.weight_dtype is int8, and each device has {uncut_matrix} of {the_model}",
            why="kernels multiply codes by 64 outputs and 128 inputs, and others are unpacked in "
            "each decode step, which takes longer than to read them in the model's format",
            fix="engine.weight_dtype = auto | use another engine.tensor_parallel_size"),
    needs("cuda.bindings", f"{_BACKEND} = embedded", "@uses_gpu_of_host",
          by=f"{_BACKEND}=embedded on a GPU"),
)  # fmt: skip

_TENSOR_PARALLEL = (
    error(f"{_SIZE} does not divide @num_processes", only=("rl",), given=("not @is_apart",),
          why="an engine beside trainers samples on the devices of as many of them",
          fix=f"start a multiple of {{{_SIZE}}} processes (--nproc N) | give engines devices of "
          "their own: cluster.num_engines"),
    error(f"{_SIZE} > 1", _VLLM, only=("rl",), given=("not @is_apart",),
          why="beside trainers vLLM samples on one device each",
          fix=f"{_BACKEND} = embedded | {_SIZE} = 1 | give engines devices of their own: "
          "cluster.num_engines"),
    error(f"{_SIZE} > 1", "not @is_divided",
          given=(f"{_BACKEND} = embedded",),
          says=f"{_SIZE} is {{{_SIZE}}}, and {{the_model}} is of the family {{family}}",
          why=f"only {DIVIDED} are divided among devices", fix=f"{_SIZE} = 1"),
    error(f"{_SIZE} > 1", "@undivided",
          says=f"{_SIZE} is {{{_SIZE}}}, which does not divide {{undivided}} of {{the_model}}",
          fix=f"use a smaller power of two for {_SIZE}; further devices run as replicas"),
    error(f"{_SIZE} does not divide @num_processes", only=("eval", "generate"),
          why="each device of an engine takes a process, and further engines are replicas",
          fix=f"start a multiple of {{{_SIZE}}} processes (torchrun --nproc-per-node N)"),
    error(f"{_SIZE} != @num_processes", only=("bench engine",),
          why="one engine is measured, with a process for each of its devices",
          fix=f"start {{{_SIZE}}} of them, with torchrun --nproc-per-node where it is more than 1"),
)  # fmt: skip

_EXACT = (
    *excludes("model.exact", "model.exact = false", {
        "run.device = cpu": ("its kernels are for GPUs", "cuda"),
        "model.dtype = float32": ("it computes in bfloat16 alone", "auto"),
        "engine.kv_cache_dtype = fp8": ("the trainer does not round keys and values", "auto"),
        "engine.weight_dtype = int8": ("the trainer does not round weights", "auto"),
        f"{_SIZE} > 1": ("sums over devices are taken in another order than the trainer's", "1"),
    }),
    error("model.exact", "not @has_dense_fused_layers", only=_EXACT_RUNS,
          says="model.exact is on, and {the_model} is of the family {family}",
          why=f"it serves {FUSED}",
          fix="model.exact = false"),
    error("model.exact", "@exact_misfits", only=_EXACT_RUNS, given=("@has_dense_fused_layers",),
          says="model.exact is on, and {the_model} has {exact_misfits}",
          why=f"its kernels take heads of {', '.join(map(str, EXACT_HEAD_DIMS))} and widths that "
          f"are multiples of {EXACT_ALIGNMENT}",
          fix="model.exact = false"),
    needs("triton", "model.exact", "@uses_gpu_of_host", by="model.exact",
          instead="model.exact = false", only=_EXACT_RUNS),
)  # fmt: skip

_ON_VLLM = (
    error(_VLLM, "run.device = cpu", "@has_experts", only=_RUNS,
          says="engine.backend is vllm, run.device is cpu, and {the_model} has experts",
          why="on a CPU vLLM packs the weights of experts, and a sync would not reach these copies",
          fix=f"{_BACKEND} = embedded"),
    error(_VLLM, "not @has_vllm_experts", only=_RUNS,
          says="engine.backend is vllm, and {the_model} has experts and is of the family {family}",
          why=f"of models with experts vLLM serves {', '.join(VLLM_EXPERTS)} here",
          fix=f"{_BACKEND} = embedded"),
    warning(_VLLM, "@has_experts", "not algorithm.routing_replay", only=("rl",),
            says="engine.backend is vllm, {the_model} has experts, and algorithm.routing_replay is "
            "off",
            why="vLLM chooses experts by other kernels than the trainer, and the two send some "
            "tokens to different ones",
            fix="algorithm.routing_replay = true"),
    needs("vllm", _VLLM, by="engine.backend=vllm", instead=f"{_BACKEND} = embedded", only=_RUNS),
    error(_VLLM, "@vllm_version_not_served", only=_RUNS,
          says=f"{_BACKEND} is vllm, and version {{vllm_version}} is installed",
          why=f"versions {VERSIONS} are served",
          fix=f"install one of them | {_BACKEND} = embedded"),
    error(_VLLM, "run.device = cpu", "@vllm_head_dims", only=_RUNS,
          says="engine.backend is vllm, run.device is cpu, and {the_model} has heads of {head_dim}",
          why="on a CPU vLLM computes heads of {vllm_head_dims}",
          fix=f"{_BACKEND} = embedded"),
    *excludes(_VLLM, f"{_BACKEND} = embedded", {
        "model.exact": ("its kernels depend on the batch and are not the trainer's", "false"),
        "engine.kv_cache_dtype = fp8":
            ("its FP8 scales are not set anew for each weight version", "auto"),
        "engine.weight_dtype = int8":
            ("its formats of 8 bits are not filled by syncs", "auto"),
    }),
    error("engine.max_num_batched_tokens < engine.max_num_seqs", _VLLM, only=_RUNS,
          why="vLLM refuses that",
          fix="raise engine.max_num_batched_tokens"),
    error(f"sampling.temperature < {LOWEST_TEMPERATURE}", _VLLM,
          given=("sampling.temperature > 0",),
          why=f"vLLM raises what is below {LOWEST_TEMPERATURE} to that, and would sample from "
          "another distribution",
          fix=f"use 0 (greedy) | {LOWEST_TEMPERATURE} or more"),
    warning("engine.enable_sleep", _VLLM, "run.device = cpu", only=_RUNS,
            why="vLLM frees nothing there", fix="remove engine.enable_sleep"),
    error(_VLLM, only=("bench engine",),
          why="`hone bench engine` measures the embedded engine, and runs vLLM beside it where "
          "against is vllm",
          fix=f"{_BACKEND} = embedded"),
)  # fmt: skip

RULES = (*_ENGINE, *_TENSOR_PARALLEL, *_EXACT, *_ON_VLLM)
