"""Steps and resumes optimizers in one of two processes (`tests.ranks`); rank 0 prints JSON."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hone.checkpoint.random_state import capture_random_state
from hone.checkpoint.store import CheckpointStore
from hone.config.parallel import AxisSizes, ParallelConfig
from hone.config.trainer import OptimizerConfig
from hone.distributed.mesh import Mesh
from hone.loops.resuming import restore
from hone.trainer import update_rules
from hone.trainer.update_rules import FlatLayout, ParameterOptimizer
from tests.trainer.examples import make_trainer, random_rows, tiny_model

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


def resumed(folder, parallel, state_dtype):
    """What a resumed trainer has, and makes of the next step, against one that went on."""
    mesh = Mesh.of_group(
        AxisSizes.of(ParallelConfig(**parallel), dist.get_world_size()),
        torch.device("cpu"),
        timeout=timedelta(seconds=60),
    )

    def fresh(seed):
        return make_trainer(
            tiny_model(seed=seed),
            mesh=mesh,
            parallel=parallel,
            offload_optimizer=True,
            optimizer={"lr": 0.01, "state_dtype": state_dtype},
        )

    def weights(trainer):
        return {n: t.clone() for n, t in trainer.named_weights()}

    def moments(trainer):
        tensors, _ = trainer.state_dict()
        return {n: whole(t).clone() for n, t in tensors.items() if n.startswith("optimizer/")}

    def wrong(got, expected):
        assert got.keys() == expected.keys()
        return [n for n, t in expected.items() if not torch.equal(got[n], t)]

    straight, rows = fresh(0), random_rows(6)
    for _ in range(2):
        straight.update(rows)
    store = CheckpointStore(folder, mesh=mesh, timeout_s=30)
    tensors, metadata = straight.state_dict()
    parts = {"trainer": tensors, "trainer_metadata": metadata, "random": capture_random_state()}
    store.save_in_background(2, parts)
    saved_weights, saved_moments = weights(straight), moments(straight)
    straight.update(rows)
    store.wait()

    loaded = store.load("latest").parts
    other = fresh(1)
    other.update(rows)  # to be forgotten
    restore(other, loaded)
    found = {
        "weights": wrong(weights(other), saved_weights),
        "moments": wrong(moments(other), saved_moments),
        "zeros": sum(not bool(t.any()) for t in saved_moments.values()),
    }
    other.update(rows)
    alone = make_trainer(
        tiny_model(seed=1), offload_optimizer=True, optimizer={"state_dtype": state_dtype}
    )
    restore(alone, loaded)
    return found | {
        "next weights": wrong(weights(other), weights(straight)),
        "next moments": wrong(moments(other), moments(straight)),
        "alone": wrong(moments(alone), saved_moments),
    }


def refused(folder):
    """The error of going on from moments of which the checkpoint knows no shards."""
    with patch.object(update_rules, "laid_out", lambda local, like: local):
        try:
            resumed(folder, {"zero_stage": 2}, "float32")
        except ValueError as error:
            return str(error)
    return ""


def main(folder):
    folder = Path(folder)
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
    for name, parallel, dtype in (
        ("zero 2", {"zero_stage": 2}, "float32"),
        ("zero 2, bfloat16", {"zero_stage": 2}, "bfloat16"),
        ("tensor", {"tensor_parallel_size": 2}, "bfloat16"),
    ):
        found[name] = resumed(folder / name.replace(", ", "_"), parallel, dtype)
    found["planted, plain moments"] = refused(folder / "plain")
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        json.dump(everyone, sys.stdout)
    dist.destroy_process_group()
