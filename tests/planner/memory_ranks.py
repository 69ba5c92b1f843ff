"""What trainers in one of several processes hold (`tests.ranks`); rank 0 prints JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist

from hone.distributed.mesh import Mesh, MeshSizes
from tests.planner.memory_cases import CASES, held, plan, settings


def main():
    dist.init_process_group("gloo")
    outcomes = {}
    for name, case in CASES.items():
        cfg = settings(case)
        sizes = MeshSizes.of(cfg.parallel, dist.get_world_size())
        mesh = Mesh.of_group(sizes, torch.device("cpu"), timeout=timedelta(seconds=100))
        planned = plan(case, dist.get_world_size())
        outcomes[name] = {"held": held(case, mesh), "planned": asdict(planned)}
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(outcomes))
    dist.destroy_process_group()
