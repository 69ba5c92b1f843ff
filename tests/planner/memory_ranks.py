"""What trainers in one of several processes hold (`tests.ranks`); rank 0 prints JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist

from hone.config.parallel import AxisSizes
from hone.distributed.mesh import Mesh
from tests.planner.memory_cases import CASES, OFFLOADED, held, held_on_host, plan, settings


def mesh_of(case):
    sizes = AxisSizes.of(settings(case).parallel, dist.get_world_size())
    return Mesh.of_group(sizes, torch.device("cpu"), timeout=timedelta(seconds=100))


def main():
    dist.init_process_group("gloo")
    outcomes = {}
    for name, case in CASES.items():
        planned = plan(case, dist.get_world_size())
        outcomes[name] = {"held": held(case, mesh_of(case)), "planned": asdict(planned)}
    for name, case in OFFLOADED.items():
        case = case | {"parallel": {"zero_stage": 3, **case.get("parallel", {})}}
        planned = plan(case, dist.get_world_size())
        outcomes[name] = {"held": held_on_host(case, mesh_of(case)), "planned": asdict(planned)}
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(outcomes))
    dist.destroy_process_group()
