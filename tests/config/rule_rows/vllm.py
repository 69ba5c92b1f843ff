"""Combinations that the rules on vLLM find."""

from __future__ import annotations

from tests.config.rule_rows.row import Row

ROWS: list[Row] = [
    *[("rl", f"engine.backend=vllm {key}={value}", "error", f"{key} engine.backend")
      for key, value in (
          ("model.exact", "true"), ("engine.kv_cache_dtype", "fp8"),
          ("engine.weight_dtype", "int8"),
          ("rollout.temperature", "0.001"), ("engine.max_num_batched_tokens", "8"))],
    ("eval", "engine.backend=vllm eval.temperature=0.001", "error",
     "eval.temperature engine.backend"),
    ("rl", "engine.backend=vllm engine.tensor_parallel_size=2", "error",
     "engine.tensor_parallel_size engine.backend"),
    ("generate", "engine.backend=vllm engine.tensor_parallel_size=3", "error",
     "engine.tensor_parallel_size model.path"),
    ("rl", "engine.backend=vllm engine.enable_sleep=true run.device=cpu", "warning",
     "engine.enable_sleep engine.backend run.device"),
    ("rl", "model.path=qwen3_moe engine.backend=vllm run.device=cpu", "error",
     "engine.backend run.device model.path"),
    ("rl", "model.path=qwen3_moe engine.backend=vllm", "warning",
     "engine.backend model.path algorithm.routing_replay"),
    ("rl", "model.path=glm4_moe engine.backend=vllm", "error", "engine.backend model.path"),
    ("bench engine", "engine.backend=vllm", "error", "engine.backend"),
    *[(command, "model.path=qwen3_vl engine.backend=vllm", "error", "engine.backend model.path")
      for command in ("rl", "eval", "generate")],
    ("rl", "pipeline.max_staleness=1 engine.backend=vllm", "error",
     "engine.backend pipeline.max_staleness cluster.num_engines"),
]  # fmt: skip
