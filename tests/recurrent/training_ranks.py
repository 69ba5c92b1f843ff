"""Trains a hybrid model in one of two processes (`tests.ranks`), part after part."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from hone.attention.recurrent import mixing
from hone.models.adapters import adapt
from hone.models.manifest import export_weights
from hone.models.settings import LoraConfig
from hone.trainer import tensor
from tests.rank_cases import (
    STEP,
    Case,
    difference,
    go_on,
    metric_error,
    on_mesh,
    outcomes,
    scalars,
    start,
    supervised_steps,
    worst_of,
)
from tests.recurrent.models import HYBRID
from tests.trainer.examples import make_trainer, near_policy, random_rows, tiny_model

MODEL: dict[str, Any] = {**HYBRID, "tie_word_embeddings": True, "num_hidden_layers": 2} | {
    "layer_types": ["linear_attention", "full_attention"],
}
GROUPS = partial(random_rows, 8, seed=3, shared_prompt=40)
"""Rows of which each four share a prompt."""
ONE_ROW = {"micro_batch_size": 1}

LAYOUTS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"zero_stage": stage} for stage in range(4)},
    "tensor": {"tensor_parallel_size": 2},
    "ulysses": {"ulysses_size": 2, "zero_stage": 3},
    "pipeline": {"pipeline_parallel_size": 2},
}
CASES: dict[str, Case] = {
    **{name: Case(layout, GROUPS, model=MODEL) for name, layout in LAYOUTS.items()},
    "stage 3, recomputed": Case(
        {"zero_stage": 3}, GROUPS, {"recompute": "full", "micro_batch_size": 3}, model=MODEL
    ),
    "tensor, recomputed": Case(
        {"tensor_parallel_size": 2}, GROUPS, {"recompute": "selective"}, model=MODEL
    ),
    "ulysses, recomputed": Case({"ulysses_size": 2}, GROUPS, {"recompute": "full"}, model=MODEL),
}
BFLOAT16 = {
    name: replace(CASES[name], alike=ONE_ROW, dtype=torch.bfloat16)
    for name in ("stage 1", "stage 3", "tensor")
}
ON = {
    "the same": ({"zero_stage": 1}, {"zero_stage": 1}),
    "from tensor to shards": ({"tensor_parallel_size": 2}, {"zero_stage": 3}),
    "from shards to tensor": ({"zero_stage": 2}, {"tensor_parallel_size": 2}),
}
BUGS: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
    "rows as they lie": (
        "tensor",
        lambda: patch.object(tensor, "own_rows", lambda weight, _: tensor.own_part(weight)),
    ),
    "convolution of other heads": (
        "ulysses",
        lambda: patch.object(
            mixing, "_own_channels", lambda weight, heads, axis: weight.flip(0).chunk(axis.size)[0]
        ),
    ),
}


def layouts() -> Any:
    return outcomes(CASES)


def bfloat16() -> Any:
    return outcomes(BFLOAT16)


def resumed() -> Any:
    return go_on(ON, **MODEL)


def supervised() -> Any:
    """The largest differences of metrics of SFT in shards and over the tensor axis."""
    found = {}
    for name in ("stage 3", "tensor"):
        alone, group = supervised_steps(LAYOUTS[name], **MODEL)
        found[name] = max(
            metric_error(key, own.get(key, 0.0), value)
            for own, want in zip(group, alone, strict=True)
            for key, value in want.items()
        )
    return found


def adapters() -> Any:
    """Differences of merged weights after two steps of adapters in shards, and the names of what
    has them."""
    rows = GROUPS()
    near_policy(rows, make_trainer(tiny_model(**MODEL)))
    weights: list[dict[str, Any]] = []
    for parallel in (None, {"zero_stage": 3}):
        model = tiny_model(**MODEL)
        adapt(model, LoraConfig(rank=3), seed=1)
        mesh = None if parallel is None else on_mesh(parallel)
        trainer = make_trainer(model, mesh=mesh, parallel=parallel or {}, **STEP)
        for _ in range(2):
            scalars(trainer.update(rows))
        weights.append(dict(trainer.named_weights()))
    before = dict(export_weights(tiny_model(**MODEL)))
    return {
        "difference": max(difference(weights[1][n], w) for n, w in weights[0].items()),
        "moved": sorted(n for n, w in weights[0].items() if not torch.equal(w, before[n])),
    }


def planted() -> Any:
    return {
        name: worst_of(replace(CASES[case], plant=plant), "logprobs", "gradient")
        for name, (case, plant) in BUGS.items()
    }


def main() -> None:
    start([layouts, bfloat16, resumed, supervised, adapters, planted])
