"""Replays routes in one of several processes (`tests.ranks`), of any choice of experts."""

from __future__ import annotations

import torch

from hone.types import Column
from tests.rank_cases import Case, outcomes, start
from tests.trainer.examples import random_rows
from tests.trainer.route_cases import FAMILIES

NUM_EXPERTS, PER_TOKEN = 8, 2
LAYOUTS = {
    "experts divided": ({"expert_parallel_size": 2, "zero_stage": 3}, {"recompute": "full"}),
    "split sequences": ({"ulysses_size": 2}, {}),
    "ring": ({"ring_size": 2, "expert_parallel_size": 2}, {}),
    "tensor": ({"tensor_parallel_size": 2, "expert_parallel_size": 2}, {}),
    "stages": ({"pipeline_parallel_size": 2}, {"recompute": "full"}),
}


def rows_with_routes():
    """Any experts, of all tokens but the last."""
    rows, draw = random_rows(7, seed=5), torch.Generator().manual_seed(8)
    for row in rows:
        order = torch.rand(row.num_tokens, 2, NUM_EXPERTS, generator=draw).argsort(-1)
        routes = order[..., :PER_TOKEN].to(torch.uint8)
        routes[-1] = 255
        row.columns["routes"] = Column(routes, per="token")
    return rows


CASES = {
    f"{family}, {name}": Case(
        parallel,
        rows_with_routes,
        {"micro_batch_size": 2, **settings},
        alike={"replays_routes": True},
        model={"family": family, **fields},
        objective={"entropy_coef": 0.1},
    )
    for family, fields in FAMILIES.items()
    for name, (parallel, settings) in LAYOUTS.items()
    if name not in {"ring", "tensor"} or "layer_types" not in fields  # hybrids are refused there
}


def replayed():
    return outcomes(CASES)


def main() -> None:
    start([replayed])
