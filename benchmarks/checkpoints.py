"""Checkpoints and exports of several processes: hone's beside `torch.distributed.checkpoint`.

    python -m benchmarks.checkpoints --processes 4 --gib 1 --folder /somewhere/with/room

Processes hold shards of a model as training does, on one CPU or, with `--device cuda`, on a GPU
each: float32 masters and two moments, DTensors whose rows are dealt out as FSDP2 deals them. Each
line has the seconds of the slowest process per GB (1e9 bytes), the fastest of several rounds, and
the host memory that all processes together needed beyond what they had, in bytes per byte. An
export is of bfloat16 weights. Files are flushed to disk by both, and read from the page cache.

hone's figures include a checksum of each file, made when it is written and compared when it is
read. torch has none: for comparison its figures are given with these checksums as well.
"""

from __future__ import annotations

import argparse
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files_on_every_rank,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from transformers import Qwen3Config, Qwen3ForCausalLM

from hone.checkpoint.atomic import record_file
from hone.checkpoint.export import export_hf
from hone.checkpoint.sharded import local_part, own_part
from hone.checkpoint.store import CheckpointStore
from hone.distributed.joined import JoinedMesh
from hone.distributed.mesh import Mesh
from hone.distributed.settings import AxisSizes
from hone.models.tiny import make_char_tokenizer
from hone.trainer.gathering import wholes

PORT = 29571


def make_model(num_bytes: int) -> Qwen3ForCausalLM:
    """A model without weights whose masters and moments have about `num_bytes`."""
    layer_bytes = 12 * 1024 * (2 * 2048 + 2 * 1024 + 3 * 3072)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=max(1, num_bytes // layer_bytes),
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        return Qwen3ForCausalLM(config)


def make_state(model: Qwen3ForCausalLM, line: DeviceMesh, fill: float) -> dict[str, Tensor]:
    device = line.device_type
    tensors: dict[str, Tensor] = {}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        shape = (parameter.shape[0] // line.size(), *parameter.shape[1:])
        for kind in ("weights", "exp_avg", "exp_avg_sq"):
            local = torch.full(shape, fill, device=device)
            local += torch.linspace(0, number, shape[-1], device=device)
            tensors[f"{kind}/{name}"] = DTensor.from_local(local, line, [Shard(0)], run_check=False)
        tensors[f"step/{name}"] = torch.tensor(fill)
    return tensors


class Measured:
    """Times `work` in all processes at once, and prints the best of several rounds."""

    def __init__(self, num_bytes: int, rounds: int) -> None:
        self._gb, self._rounds = num_bytes / 1e9, rounds

    def __call__(
        self, what: str, work: Callable[[], Any], after: Callable[[], Any] = dist.barrier
    ) -> None:
        seconds, peaks = [], []
        for _ in range(self._rounds):
            found = self._once(work)
            seconds.append(max(s for s, _ in found))
            peaks.append(sum(peak for _, peak in found))
            after()
            dist.barrier()
        if dist.get_rank() == 0:
            per_byte = max(peaks) / 1e9 / self._gb
            print(f"{what:44}{min(seconds) / self._gb:7.3f} s/GB {per_byte:6.2f} bytes", flush=True)

    def _once(self, work: Callable[[], Any]) -> list[tuple[float, int]]:
        before, done = anonymous_bytes(), threading.Event()
        peaks = [before]

        def watch() -> None:
            while not done.wait(0.01):
                peaks.append(anonymous_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        os.sync()
        dist.barrier()
        start = time.perf_counter()
        work()
        seconds = time.perf_counter() - start
        done.set()
        watcher.join()
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (seconds, max(peaks) - before))
        return found


def anonymous_bytes() -> int:
    """Memory of this process but for pages of files."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def join(rank: int, size: int, device: str) -> tuple[DeviceMesh, Mesh]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT)}
    timeout = timedelta(seconds=600)
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout)
    mesh = JoinedMesh.of_group(
        AxisSizes(data=size, fsdp=size), torch.device(device), timeout=timeout
    )
    return init_device_mesh(device, (size,)), mesh


def record_own(folder: Path, rank: int) -> None:
    for path in folder.glob(f"__{rank}_*.distcp"):
        record_file(path)


def measure_saving(rank: int, size: int, cfg: argparse.Namespace) -> None:
    line, mesh = join(rank, size, cfg.device)
    model = make_model(cfg.num_bytes)
    state = make_state(model, line, fill=3.0)
    measured = Measured(sum(t.numel() * 4 for t in state.values()), cfg.rounds)
    store = CheckpointStore(cfg.folder / "hone", keep_last=1, mesh=mesh)
    measured("hone: save", lambda: store.save(1, {"trainer": state}))
    measured(
        "hone: save behind, until it returns",
        lambda: store.save_in_background(2, {"trainer": state}),
        store.wait,
    )
    path = cfg.folder / "torch"
    writer = partial(dcp.FileSystemWriter, path)
    measured("torch: save", lambda: dcp.save(state, storage_writer=writer()))
    measured("  and checksums", lambda: record_own(path, rank))
    saves: list[Any] = []
    group = dist.new_group(
        backend="gloo"
    )  # its thread has collectives, which must not meet those of training
    measured(
        "torch: save behind, until it returns",
        lambda: saves.append(dcp.async_save(state, storage_writer=writer(), process_group=group)),
        lambda: saves.pop().result(),
    )
    dist.destroy_process_group()


def measure_loading(rank: int, size: int, cfg: argparse.Namespace) -> None:
    line, mesh = join(rank, size, cfg.device)
    state = make_state(make_model(cfg.num_bytes), line, fill=0.0)
    measured = Measured(sum(t.numel() * 4 for t in state.values()), cfg.rounds)

    def load() -> None:
        saved: Any = CheckpointStore(cfg.folder / "hone", mesh=mesh).load().parts["trainer"]
        for name, tensor in state.items():
            local_part(tensor).copy_(own_part(saved[name], like=tensor))

    path = cfg.folder / "torch"
    files = sorted(path.glob("*.distcp"))[rank::size]
    measured(f"hone: load by {size} processes", load)
    measured(f"torch: load by {size} processes", lambda: dcp.load(state, checkpoint_id=path))
    measured("  and checksums", lambda: [record_file(file) for file in files])
    dist.destroy_process_group()


def measure_export(rank: int, size: int, cfg: argparse.Namespace) -> None:
    line, mesh = join(rank, size, cfg.device)
    model = make_model(cfg.num_bytes)
    state = make_state(model, line, fill=3.0)
    weights = {
        name: state[f"weights/{name}"].to(torch.bfloat16) for name, _ in model.named_parameters()
    }
    del state
    num_bytes = sum(t.numel() * 2 for t in weights.values())
    measured, file_bytes = Measured(num_bytes, cfg.rounds), num_bytes // (2 * size)
    tokenizer = make_char_tokenizer("ab")

    def gathered() -> Iterator[tuple[str, Tensor]]:
        values = ((tensor, tensor.dtype) for tensor in weights.values())
        return zip(weights, wholes(values), strict=True)

    def export() -> None:
        args = (model, tokenizer, cfg.folder / "model", torch.bfloat16, gathered())
        export_hf(*args, mesh=mesh, file_bytes=file_bytes)

    total, index = 0, dict[str, int]()
    for name, tensor in weights.items():
        total += tensor.numel() * 2
        index[name] = 1 + total // file_bytes
    shards, path = cfg.folder / "shards", cfg.folder / "consolidated"

    def consolidate() -> None:
        path.mkdir(exist_ok=True)
        dist.barrier()
        writer = dcp.HuggingFaceStorageWriter(str(shards), index, save_distributed=True)
        dcp.save(weights, storage_writer=writer)
        consolidate_safetensors_files_on_every_rank(str(shards), str(path), index)

    measured("gathering of the weights alone", lambda: [None for _ in gathered()])
    measured("hone: export", export)
    measured("torch: export", consolidate)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--gib", type=float, default=1.0, help="of masters and moments")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    cfg = parser.parse_args()
    cfg.folder /= "checkpoints"
    cfg.num_bytes = int(cfg.gib * 2**30)
    shutil.rmtree(cfg.folder, ignore_errors=True)
    cfg.folder.mkdir(parents=True)
    size = cfg.processes
    mp.spawn(measure_saving, (size, cfg), nprocs=size)
    readers = {"cpu": (size, max(1, size // 2), 2 * size), "cuda": (size, max(1, size // 2))}
    for number in readers[cfg.device]:
        mp.spawn(measure_loading, (number, cfg), nprocs=number)
    mp.spawn(measure_export, (size, cfg), nprocs=size)
    shutil.rmtree(cfg.folder)


if __name__ == "__main__":
    main()
