"""Saves and loads in one of four processes (`tests.ranks`); rank 0 prints JSON."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from tests.rank_cases import TIMEOUT_S, on_mesh
from tests.trainer.examples import VOCAB, logprobs_of, make_reference, make_trainer, random_rows
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import AutoTokenizer

from hone.algorithms.settings import AlgorithmConfig
from hone.checkpoint import export as export_module
from hone.checkpoint import store as store_module
from hone.checkpoint.atomic import CheckpointError
from hone.checkpoint.export import export_hf
from hone.checkpoint.sharded import laid_out, own_part
from hone.checkpoint.store import CheckpointStore
from hone.distributed.mesh import Mesh
from hone.models.load import load_deferred, load_model
from hone.models.manifest import export_weights
from hone.models.settings import ModelConfig
from hone.models.tiny import make_tiny_model
from hone.trainer.gathering import wholes

CPU = torch.device("cpu")
LAYOUTS = {
    "rows": [Shard(0), Replicate()],
    "columns": [Replicate(), Shard(1)],
    "both": [Shard(0), Shard(1)],
    "twice the rows": [Shard(0), Shard(0)],
    "copies": [Replicate(), Replicate()],
    "other copies": [Replicate(), Replicate()],
}


def whole(name):
    """The same on every process; 7 x 5 splits evenly nowhere, 1 x 3 leaves some with nothing."""
    draw = torch.Generator().manual_seed(sum(map(ord, name)))
    shape = (1, 3) if name == "small" else (7, 5)
    return torch.randn(shape, generator=draw)


def model(mesh):
    """Two layers, split over `tensor` and then sharded: both axes may cut the same dimension."""
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6))
    if mesh is not None:
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(layers, mesh["tensor"], plan)
        fully_shard(layers, mesh=mesh["shard"])
    return layers


def outcome(work):
    try:
        work()
    except CheckpointError as error:
        return str(error)
    return None


DEFERRED = {
    "stage 3": ("pretrained", {"zero_stage": 3}),
    "two copies": ("random", {"zero_stage": 2, "fsdp_size": 2}),
    "data 2 x tensor 2": ("pretrained", {"tensor_parallel_size": 2, "zero_stage": 3}),
}
SHAPE = {"vocab_size": VOCAB + 1, "hidden_size": 24, "num_layers": 2, "head_dim": 8}


def deferred(folder):
    """What trainers of deferred models have that differs from those of whole ones."""
    wrong = []
    for name, (init, parallel) in DEFERRED.items():
        cfg = ModelConfig(path=str(folder), init=init, dtype="bfloat16")
        mesh = on_mesh(parallel)
        trainers = [
            make_trainer(
                load(cfg, device=CPU, seed=4),
                AlgorithmConfig.model_validate({"kl": {"coef": 0.1}}),
                mesh=mesh,
                parallel=parallel,
                optimizer={"lr": 0.01},
            )
            for load in (load_deferred, load_model)
        ]
        references = [
            make_reference(load(cfg, device=CPU, seed=4), mesh=mesh, parallel=parallel)
            for load in (load_deferred, load_model)
        ]
        rows = random_rows(7)
        found = [dict(trainer.named_weights()) for trainer in trainers]
        found.append(dict(load_model(cfg, device=CPU, seed=4).state_dict()))
        scores = [torch.cat(logprobs_of(reference, rows)) for reference in references]
        for trainer in trainers:
            trainer.update(rows)
        trained = [dict(trainer.named_weights()) for trainer in trainers]
        pairs = {"weights": found[:2], "all": found[1:], "after a step": trained}
        for when, (one, other) in pairs.items():
            wrong += [
                f"{name}, {when}: {n}" for n, t in one.items() if not torch.equal(t, other[n])
            ]
        wrong += [] if torch.equal(*scores) else [f"{name}: reference"]
    return wrong


def exported(folder, mesh, line):
    """What four processes have exported of a model of which each has a part: what differs from the
    files of one, and what is said where one of them cannot write."""
    whole_model = load_model(ModelConfig(path=str(folder / "model")), device=CPU, seed=4)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    held = {
        name: distribute_tensor(tensor, line, [Shard(0) if tensor.ndim > 1 else Replicate()])
        for name, tensor in whole_model.state_dict().items()
    }

    def export(name, mesh, weights):
        args = (whole_model, tokenizer, folder / name, torch.bfloat16, weights)
        return export_hf(*args, mesh=mesh, file_bytes=3_000)

    def gathered():
        return zip(held, wholes((t, t.dtype) for t in held.values()), strict=True)

    if mesh.is_first:
        export("one", Mesh.alone("cpu"), export_weights(whole_model))
    export("four", mesh, gathered())
    ours, theirs = (
        {path.name: path.read_bytes() for path in (folder / name).iterdir()}
        for name in ("one", "four")
    )
    differing = [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]

    def refuse(*args):
        raise CheckpointError("the disk is on fire")

    broken = patch.object(export_module, "write_tensors", refuse)
    with broken if mesh.world.rank == 2 else patch.dict({}):
        failed = outcome(lambda: export("four", mesh, gathered()))
    stays = {path.name: path.read_bytes() for path in (folder / "four").iterdir()} == theirs
    return {
        "num_files": len([name for name in theirs if name.endswith(".safetensors")]),
        "differing": differing,
        "one fails": failed,
        "former stays": stays,
        "refused": refusal(lambda: export("model", mesh, gathered())),
    }


def refusal(work):
    try:
        work()
    except (CheckpointError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def main(folder):
    folder = Path(folder)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank = dist.get_rank()
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    line = init_device_mesh("cpu", (4,))
    mesh = on_mesh({"zero_stage": 3})
    store = CheckpointStore(folder / "run", keep_last=5, mesh=mesh, timeout_s=TIMEOUT_S)

    tensors = {name: distribute_tensor(whole(name), grid, p) for name, p in LAYOUTS.items()}
    tensors["small"] = distribute_tensor(whole("small"), line, [Shard(0)])
    tensors["plain"] = whole("plain") if rank == 0 else torch.zeros(7, 5)
    tensors |= dict(model(grid).named_parameters())
    parts = {"trainer": tensors, "data": {"cursor": 64, "rank": rank}}
    store.save(1, parts)
    store.save_in_background(2, parts, metric=0.5)
    with torch.no_grad():  # what is trained in the meantime is not what was saved
        for tensor in tensors.values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).add_(1)
    store.wait()

    found = {}
    loaded = store.load("latest")
    found["step"], found["data"] = loaded.step, loaded.parts["data"]
    saved = loaded.parts["trainer"]
    wrong = [n for n in [*LAYOUTS, "small", "plain"] if not torch.equal(saved[n].full(), whole(n))]
    for name, value in model(None).named_parameters():
        if not torch.equal(saved[name].full(), value):
            wrong.append(name)
    for name in LAYOUTS:  # onto another mesh, cut the other way
        like = distribute_tensor(torch.zeros(7, 5), line, [Shard(1)])
        taken = laid_out(own_part(saved[name], like=like), like=like)
        if not torch.equal(taken.full_tensor(), whole(name)) or taken.placements != like.placements:
            wrong.append(f"{name} taken")
    fresh = model(grid)
    for name, parameter in fresh.named_parameters():
        taken = laid_out(own_part(saved[name], like=parameter), like=parameter)
        if not torch.equal(taken.full_tensor(), dict(model(None).named_parameters())[name]):
            wrong.append(f"{name} taken")
    found["wrong"] = wrong
    writers = {part.file.name for name in ("copies", "other copies") for part in saved[name].parts}
    found["writers of copies"] = len(writers)

    def refuse(*args):
        raise OSError("the disk is on fire")

    with patch.object(store_module, "write_tree", refuse) if rank == 2 else patch.dict({}):
        found["one fails"] = outcome(lambda: store.save(3, parts))
    hidden = [path.name for path in (folder / "run").iterdir() if path.name.startswith(".")]
    found["left behind"] = hidden
    if rank == 0:
        path = folder / "run" / "step_2" / "trainer.rank3.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    dist.barrier()
    found["one is damaged"] = outcome(lambda: store.load(2))
    found["fallback"] = store.load("latest").step

    slow = CheckpointStore(folder / "slow", mesh=mesh, timeout_s=5)
    waits = patch.object(CheckpointStore, "_report", lambda *args: None)
    with waits if rank == 1 else patch.dict({}):
        found["one is silent"] = outcome(lambda: slow.save(1, parts))
    if rank == 0:
        make_tiny_model(folder / "model", **SHAPE)
    dist.barrier()
    found["deferred"] = deferred(folder / "model")
    found["export"] = exported(folder, mesh, line)
    everyone = mesh.gather(found)
    if rank == 0:
        print(json.dumps(everyone))  # noqa: T201
    dist.destroy_process_group()
