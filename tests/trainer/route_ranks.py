"""Replays routes in one of several processes (`tests.ranks`), of any choice of experts."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from hone.config.algorithm import AlgorithmConfig
from hone.types import Column
from tests.ranks import run_parts
from tests.trainer.examples import random_rows, tiny_model
from tests.trainer.parallel_ranks import compare, rows_near
from tests.trainer.route_cases import FAMILIES

NUM_EXPERTS, PER_TOKEN = 8, 2
LAYOUTS = {
    "experts divided": {"expert_parallel_size": 2, "zero_stage": 3},
    "split sequences": {"ulysses_size": 2},
    "ring": {"ring_size": 2, "expert_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
}


def with_routes(rows):
    """Any experts, of all tokens but the last."""
    draw = torch.Generator().manual_seed(8)
    for row in rows:
        order = torch.rand(row.num_tokens, 2, NUM_EXPERTS, generator=draw).argsort(-1)
        routes = order[..., :PER_TOKEN].to(torch.uint8)
        routes[-1] = 255
        row.columns["routes"] = Column(routes, per="token")
    return rows


def replayed():
    cfg, found = AlgorithmConfig(entropy_coef=0.1), {}
    for family, fields in FAMILIES.items():
        model = {"family": family, **fields}
        rows = with_routes(rows_near(tiny_model(**model), cfg, random_rows(7, seed=5)))
        for name, parallel in LAYOUTS.items():
            settings = {"micro_batch_size": 2, "parallel": parallel, "replays_routes": True}
            if name in ("experts divided", "stages"):
                settings["recompute"] = "full"
            found[f"{family}, {name}"] = compare(model, cfg, rows, settings)
    return found


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    run_parts([replayed])
