"""What `parallel_ranks` runs and `test_parallel` judges."""

from __future__ import annotations

from typing import Any

from tests.trainer.test_gradient_invariance import CUTS, OBJECTIVES

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        **{f"stage {stage}": {"zero_stage": stage} for stage in range(4)},
        "tensor": {"tensor_parallel_size": 2},
        "ulysses": {"ulysses_size": 2, "zero_stage": 3},
        "ring": {"ring_size": 2, "zero_stage": 1},
    },
    4: {
        **{f"stage {stage}": {"zero_stage": stage} for stage in range(4)},
        **{
            f"stage {stage}, two copies": {"zero_stage": stage, "fsdp_size": 2}
            for stage in range(1, 4)
        },
        "data 2 x tensor 2": {"tensor_parallel_size": 2, "zero_stage": 3},
        "data 2 x tensor 2, two copies": {"tensor_parallel_size": 2, "zero_stage": 0},
        "data 2 x ulysses 2": {"ulysses_size": 2, "zero_stage": 2},
        "data 2 x ring 2": {"ring_size": 2, "zero_stage": 3, "fsdp_size": 2},
        "ring 2 x ulysses 2": {"ring_size": 2, "ulysses_size": 2, "zero_stage": 3},
        "ring 2 x tensor 2": {"ring_size": 2, "tensor_parallel_size": 2},
        "ring 4": {"ring_size": 4},
    },
}
"""`trainer.parallel` by number of processes and name."""

_MODELS: list[dict[str, Any]] = [
    {"family": "qwen3"},
    {"family": "qwen2", "tie_word_embeddings": False},
    {"family": "llama", "tie_word_embeddings": False, "num_hidden_layers": 3},
]


def runs(world: int) -> dict[str, dict[str, Any]]:
    """Each layout with objectives, cuts and models in turn; with two processes twice."""
    layouts = list(LAYOUTS[world].items()) * (2 if world == 2 else 1)
    found: dict[str, dict[str, Any]] = {}
    for number, (layout, parallel) in enumerate(layouts):
        objective = list(OBJECTIVES)[number % len(OBJECTIVES)]
        found[f"{layout}: {objective}"] = {
            "objective": OBJECTIVES[objective],
            "model": _MODELS[number % len(_MODELS)],
            "settings": {
                **CUTS[number % len(CUTS)],
                "parallel": parallel,
                "recompute": "full" if number % 4 == 1 else "off",
            },
        }
    return found
