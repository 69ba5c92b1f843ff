"""Combinations that the rules on engines find."""

from __future__ import annotations

from tests.config.rule_rows.row import Row

ROWS: list[Row] = [
    # groups and filters (G3, G13, G15)
    ("rl", "rollout.n_samples_per_prompt=1 algorithm.advantage=reinforce_pp", "warning",
     "engine.enable_prefix_caching rollout.n_samples_per_prompt"),
    ("rl", "no-engine.enable_prefix_caching=true", "warning",
     "engine.enable_prefix_caching rollout.n_samples_per_prompt"),
    # engine (G8, E3)
    ("rl", "engine.max_num_seqs=4", "warning", "engine.max_num_seqs rollout.n_samples_per_prompt"),
    ("rl", "engine.max_num_seqs=1024", "warning",
     "engine.max_num_seqs rollout.prompts_per_step rollout.n_samples_per_prompt"),
    ("rl", "engine.max_num_batched_tokens=128", "warning",
     "engine.max_num_batched_tokens engine.max_num_seqs"),
    ("rl", "engine.max_num_batched_tokens=1024 run.device=cuda", "warning",
     "engine.max_num_batched_tokens run.device"),
    ("rl", "engine.gpu_memory_utilization=0.9", "warning",
     "engine.gpu_memory_utilization engine.kv_cache_gib"),
    ("rl", "engine.gpu_memory_utilization=0.6 engine.kv_cache_gib=1", "warning",
     "engine.gpu_memory_utilization engine.kv_cache_gib"),
    ("rl", "engine.gpu_memory_utilization=0.6 run.device=cpu", "warning",
     "engine.gpu_memory_utilization run.device"),
    ("rl", "--nproc=3 engine.tensor_parallel_size=2", "error", "engine.tensor_parallel_size"),
    ("rl", "--nproc=1 engine.tensor_parallel_size=2", "error", "engine.tensor_parallel_size"),
    ("rl", "engine.tensor_parallel_size=4", "error", "engine.tensor_parallel_size model.path"),
    ("generate", "engine.tensor_parallel_size=4", "error",
     "engine.tensor_parallel_size model.path"),
    ("rl", "model.exact=true run.device=cpu", "error", "model.exact run.device"),
    ("rl", "--gpu=cpu model.exact=true model.path=wide", "error", "model.exact run.device"),
    ("rl", "model.exact=true run.device=cuda model.dtype=float32", "error",
     "model.exact model.dtype"),
    ("eval", "model.exact=true run.device=cuda engine.kv_cache_dtype=fp8", "error",
     "model.exact engine.kv_cache_dtype"),
    ("generate", "model.exact=true run.device=cuda engine.tensor_parallel_size=2", "error",
     "model.exact engine.tensor_parallel_size"),
    ("rl", "engine.kv_cache_gib=0.0004", "error",
     "engine.kv_cache_gib data.max_prompt_tokens rollout.max_completion_tokens"),
    ("rl", "run.device=cpu data.max_prompt_tokens=3072 model.path=large", "error",
     "engine.kv_cache_gib data.max_prompt_tokens rollout.max_completion_tokens"),
    ("rl", "model.path=hybrid engine.kv_cache_dtype=fp8", "error",
     "engine.kv_cache_dtype model.path"),
    ("rl", "--gpu=A100 engine.kv_cache_dtype=fp8", "error",
     "engine.kv_cache_dtype run.device"),
    ("rl", "engine.weight_dtype=int8 run.device=cuda", "warning", "engine.weight_dtype model.path"),
    ("eval", "model.exact=true run.device=cuda engine.weight_dtype=int8", "error",
     "model.exact engine.weight_dtype"),
    *[("rl", f"engine.weight_dtype=int8 model.path={name}", "error",
       "engine.weight_dtype model.path") for name in ("glm4", "gelu", "odd")],
    # models that nothing can run, or not so
    ("rl", "model.path=glm4 model.exact=true", "error", "model.exact model.path"),
    ("rl", "model.path=qwen3_moe model.exact=true", "error", "model.exact model.path"),
    ("generate", "model.path=glm4 engine.tensor_parallel_size=2", "error",
     "engine.tensor_parallel_size model.path"),
    ("generate", "model.path=gelu engine.tensor_parallel_size=2", "error",
     "engine.tensor_parallel_size model.path"),
    *[("rl", f"model.exact=true model.path={name}", "error", "model.exact model.path")
      for name in ("gelu", "odd")],
    ("generate", "model.path=gemma2 engine.tensor_parallel_size=2", "error",
     "engine.tensor_parallel_size model.path"),
    ("rl", "model.path=gemma2 model.exact=true", "error", "model.exact model.path"),
    ("generate", "--nproc=3 engine.tensor_parallel_size=2", "error",
     "engine.tensor_parallel_size"),
    ("generate", "--nproc=1 engine.tensor_parallel_size=2", "error",
     "engine.tensor_parallel_size"),
    ("eval", "--nproc=3 engine.tensor_parallel_size=2", "error", "engine.tensor_parallel_size"),
    # traces
    ("eval", "engine.enable_sleep=true", "warning", "engine.enable_sleep"),
    # benchmarks
    ("bench engine", "--nproc=2", "error", "engine.tensor_parallel_size"),
]  # fmt: skip
