"""Steps optimizers in one of two processes (`tests.ranks`); rank 0 prints JSON."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hone.trainer.narrow_moments import FlatLayout
from hone.trainer.settings import OptimizerConfig
from hone.trainer.update_rules import ParameterOptimizer

LAYOUTS = {
    "rows": (Shard(0), Replicate()),
    "columns": (Replicate(), Shard(1)),
    "both": (Shard(0), Shard(1)),
    "last": (Replicate(), Shard(2)),
}
SHAPES = {"even": (8, 6, 4), "odd": (7, 5, 3), "one row": (1, 3, 3)}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def draw(name, step):
    seed = 100 * step + len(name)
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))


def stepped(cut, *, offload):
    """Masters and bfloat16 moments, whole, after three steps of parameters that `cut` gives."""
    named = {name: nn.Parameter(cut(draw(name, 0))) for name in SHAPES}
    cfg = OptimizerConfig(lr=0.1, weight_decay=0.1, state_dtype="bfloat16")
    optimizer = ParameterOptimizer(named, cfg, set(), offload=offload)
    for step in range(1, 4):
        optimizer.step({name: cut(draw(name, step)) for name in named}, 1.0)
    state = named | optimizer.state_dict()
    return {key: whole(tensor.detach()).clone() for key, tensor in state.items()}


def layouts(grids):
    """Names of what differs from a step without shards, by mesh, layout and place."""
    alone = stepped(lambda tensor: tensor, offload=False)
    found = {}
    for size, grid in grids.items():
        for name, placements in LAYOUTS.items():
            for offload in (False, True):

                def cut(tensor, grid=grid, placements=placements):
                    return distribute_tensor(tensor, grid, placements, src_data_rank=None)

                got = stepped(cut, offload=offload)
                key = f"{size}, {name}, {'host' if offload else 'device'}"
                found[key] = [n for n, t in alone.items() if not torch.equal(got[n], t)]
    return found


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    names = ("shard", "tensor")
    grids = {
        "2 x 1": init_device_mesh("cpu", (2, 1), mesh_dim_names=names),
        "1 x 2": init_device_mesh("cpu", (1, 2), mesh_dim_names=names),
    }
    found = {"layouts": layouts(grids)}
    with patch.object(FlatLayout, "of", lambda parameter: FlatLayout()):
        found["planted, every shard from 0"] = layouts(grids)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        json.dump(everyone, sys.stdout)
    dist.destroy_process_group()
