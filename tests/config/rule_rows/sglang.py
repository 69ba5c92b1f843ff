"""Combinations that the rules on SGLang find."""

from __future__ import annotations

from tests.config.rule_rows.row import Row

ROWS: list[Row] = [
    ("rl", "engine.backend=sglang", "error", "engine.backend"),
    ("rl", "engine.backend=sglang model.path=qwen3_moe", "error", "engine.backend model.path"),
    *[("rl", f"engine.backend=sglang {key}={value}", "error", f"{key} engine.backend")
      for key, value in (
          ("model.exact", "true"), ("engine.kv_cache_dtype", "fp8"),
          ("engine.weight_dtype", "int8"), ("engine.tensor_parallel_size", "2"),
          ("algorithm.routing_replay", "true"))],
    ("rl", "pipeline.max_staleness=1 engine.backend=sglang", "error",
     "engine.backend pipeline.max_staleness cluster.num_engines"),
    *[("eval", f"engine.backend=sglang eval.{key}={value}", "error", f"eval.{key} engine.backend")
      for key, value in (("top_p", 0.9), ("top_k", 5), ("min_p", 0.1))],
    ("rl", "engine.backend=sglang run.seed=3", "warning", "run.seed engine.backend"),
    ("bench engine", "engine.backend=sglang", "error", "engine.backend"),
    ("generate", "model.path=qwen3_vl engine.backend=sglang", "error",
     "engine.backend model.path"),
    ("rl", "engine.backend=sglang engine.enable_sleep=true run.device=cpu", "warning",
     "engine.enable_sleep engine.backend run.device"),
]  # fmt: skip
