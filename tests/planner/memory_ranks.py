"""What trainers in one of several processes hold (`tests.ranks`); rank 0 prints JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch.distributed as dist

from tests.planner.memory_cases import CASES, OFFLOADED, held, held_on_host, plan
from tests.rank_cases import on_mesh


def main():
    dist.init_process_group("gloo")
    offloaded = {
        name: case | {"parallel": {"zero_stage": 3, **case.get("parallel", {})}}
        for name, case in OFFLOADED.items()
    }
    outcomes = {}
    for cases, measured in ((CASES, held), (offloaded, held_on_host)):
        for name, case in cases.items():
            planned = asdict(plan(case, dist.get_world_size()))
            mesh = on_mesh(case.get("parallel"))
            outcomes[name] = {"held": measured(case, mesh), "planned": planned}
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(outcomes))
    dist.destroy_process_group()
