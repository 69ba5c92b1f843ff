"""What tensor parallelism is tested with."""

from __future__ import annotations

MODELS = (
    "llama, group of 4",
    "llama, all biases",
    "mistral",
    "qwen2",
    "qwen3, heads of 128, tied",
    "qwen3, biases, mixed layers",
)
"""Shapes of `test_generation_model`."""

ENGINES = {
    "plain": {},
    "chunked prefill": {"max_num_batched_tokens": 6},
    "preemption": {"blocks": 20},
    "no prefix caching": {"enable_prefix_caching": False},
}
