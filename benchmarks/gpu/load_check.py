"""Several GPUs load a model of which each keeps a part: how long, in how much memory, which bits.

    torchrun --nproc-per-node 4 -m benchmarks.gpu.load_check [--whole]

Writes random bfloat16 weights in the shape of Qwen3-8B as safetensors (16 GB under /tmp) and makes
trainers of them at stage 3: from the files in parts, also over two axes, and drawn from a seed.
`--whole` adds the way through every process's host memory, for comparison. Weights are gathered
again and their checksums compared with those of what was written. Prints progress, and last a table
of the worst process; exits with 1 where a number is outside its bound. `--dry` runs a small shape
on CPUs.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.gpu.parallel_check import make_rows
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from hone.algorithms.objective import PolicyObjective
from hone.algorithms.settings import AlgorithmConfig
from hone.distributed.joined import JoinedMesh
from hone.distributed.mesh import Mesh
from hone.distributed.processes import processes
from hone.distributed.settings import ParallelConfig
from hone.models.load import load_config, load_deferred, load_model
from hone.models.manifest import build_manifest
from hone.models.settings import ModelConfig
from hone.models.tiny import SHAPES, make_tiny_model
from hone.trainer.settings import TrainerConfig
from hone.trainer.trainer import Trainer

GIB = 1 << 30
SMALL = {"hidden_size": 64, "num_layers": 3, "vocab_size": 512, "intermediate_size": 128}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "files, in parts": ("files", "deferred", {"zero_stage": 3}),
    "files, in parts, tensor 2": (
        "files",
        "deferred",
        {"zero_stage": 3, "tensor_parallel_size": 2},
    ),
    "drawn, in parts": ("drawn", "deferred", {"zero_stage": 3}),
    "files, whole on the host": ("files", "whole", {"zero_stage": 3}),
}
START = time.perf_counter()


class HostPeak:
    """The most anonymous memory of this process beyond what it has at the start. Mapped files are
    not counted: the system takes their pages back when it needs them."""

    def __enter__(self) -> HostPeak:
        gc.collect()
        self._first = self.peak = _anonymous()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def taken(self) -> int:
        return self.peak - self._first

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.peak = max(self.peak, _anonymous())


def _anonymous() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def say(mesh: Mesh, text: str) -> None:
    if mesh.is_first:
        sys.stdout.write(f"{time.perf_counter() - START:6.1f} s  {text}\n")
        sys.stdout.flush()


def write(folder: Path, cfg: ModelConfig, mesh: Mesh) -> dict[str, int]:
    """Every process writes the tensors of some layers to a file of its own. Checksums of all."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(cfg))
    groups: dict[str, dict[str, torch.Size]] = {}
    for name, tensor in model.state_dict().items():
        parts = name.split(".")
        groups.setdefault(parts[2] if "layers" in parts else name, {})[name] = tensor.shape
    own = list(groups.items())[mesh.world.rank :: mesh.world.size]
    files: dict[str, str] = {}
    sums: dict[str, int] = {}
    for key, shapes in own:
        tensors = {
            name: (0.02 * torch.randn(shape, device=mesh.device)).bfloat16()
            for name, shape in shapes.items()
        }
        records = build_manifest(tensors.items(), 0).tensors
        sums |= {name: record.checksum for name, record in records.items()}
        file = f"model-{key}.safetensors"
        save_file({name: t.cpu() for name, t in tensors.items()}, folder / file, {"format": "pt"})
        files |= dict.fromkeys(shapes, file)
    everyones = mesh.gather((files, sums))
    if mesh.is_first:
        index = {
            "metadata": {},
            "weight_map": {n: f for own, _ in everyones for n, f in own.items()},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    mesh.gather(None)
    return {name: value for _, own in everyones for name, value in own.items()}


def make(
    load: Callable[..., PreTrainedModel], cfg: ModelConfig, mesh: Mesh, parallel: dict[str, Any]
) -> Trainer:
    return Trainer(
        load(cfg, device=mesh.device, seed=0),
        TrainerConfig.model_validate({"parallel": parallel, "compile": False}),
        PolicyObjective(AlgorithmConfig(), max_completion_tokens=4096),
        total_steps=10,
        mesh=mesh,
    )


def whole_on_host(cfg: ModelConfig, *, device: torch.device, seed: int) -> PreTrainedModel:
    return load_model(cfg, device=device, seed=seed, on_host=True)


def measure(
    way: str,
    cfg: ModelConfig,
    mesh: Mesh,
    parallel: dict[str, Any],
    expected: dict[str, int] | None,
) -> dict[str, Any]:
    on_gpu = mesh.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated() if on_gpu else 0
    mesh.gather(None)
    start = time.perf_counter()
    with HostPeak() as host:
        trainer = make(load_deferred if way == "deferred" else whole_on_host, cfg, mesh, parallel)
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() - base if on_gpu else 0
    left = torch.cuda.memory_allocated() - base if on_gpu else 0
    say(mesh, f"loaded in {seconds:.1f} s")
    logprobs = torch.cat(trainer.logprobs(make_rows(4, 128, 500)))
    records = build_manifest(trainer.named_weights(), 0).tensors
    sums = {name: record.checksum for name, record in records.items()}
    sizes = [p.numel() for p in trainer.policy.model.parameters()]
    return {
        "seconds": seconds,
        "host": host.taken,
        "peak": peak,
        "left": left,
        "finite": bool(logprobs.isfinite().all()),
        "same": sums == expected if expected is not None else len(set(mesh.gather(str(sums)))) == 1,
        # Of the largest tensor a part, in two formats; drawn ones are whole for a moment.
        "host bound": 6 * max(sizes) // mesh.world.size + GIB,
        "device bound": left + 6 * max(sizes) + GIB // 2,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--whole", action="store_true")
    given = parser.parse_args()
    own = processes()
    device = torch.device("cpu") if given.dry else torch.device("cuda", own.local_rank)
    if not given.dry:
        torch.cuda.set_device(device)
    torch.manual_seed(own.rank)
    mesh = JoinedMesh.join(ParallelConfig(zero_stage=3, timeout_s=300), own, device)
    folder = Path(mesh.gather(tempfile.mkdtemp(dir="/tmp") if mesh.is_first else "")[0])
    shape = dict(SHAPES["qwen3-8b"]) | (SMALL if given.dry else {})
    fine = True
    lines = [
        f"{'':28}{'seconds':>9}{'host GiB':>10}{'bound':>8}{'device GiB':>12}{'left':>8}  bits"
    ]
    try:
        if mesh.is_first:
            make_tiny_model(folder, **shape, weights=False)
        mesh.gather(None)
        configs = {
            "files": ModelConfig(path=str(folder), dtype="bfloat16"),
            "drawn": ModelConfig(path=str(folder), dtype="bfloat16", init="random"),
        }
        say(mesh, "writing")
        written = write(folder, configs["files"], mesh)
        say(mesh, "written")
        for name, (source, way, parallel) in CASES.items():
            if way == "whole" and not given.whole:
                continue
            say(mesh, name)
            layout = JoinedMesh.join(ParallelConfig(**parallel, timeout_s=300), own, device)
            expected = written if source == "files" else None
            found = measure(way, configs[source], layout, parallel, expected)
            ranks = mesh.gather(found)
            worst = {key: max(rank[key] for rank in ranks) for key in found}
            right = all(rank["same"] and rank["finite"] for rank in ranks)
            fits = way == "whole" or all(
                rank["host"] <= rank["host bound"] and rank["peak"] <= rank["device bound"]
                for rank in ranks
            )
            fine = fine and right and fits
            host, bound, peak, left = (
                worst[key] / GIB for key in ("host", "host bound", "peak", "left")
            )
            lines.append(
                f"{name:28}{worst['seconds']:9.1f}{host:10.2f}{bound:8.2f}{peak:12.2f}{left:8.2f}"
                f"  {'same' if right else 'WRONG'}"
            )
    finally:
        if mesh.is_first:
            shutil.rmtree(folder, ignore_errors=True)
    if mesh.is_first:
        sys.stdout.write("\n".join([*lines, "all fine" if fine else "NOT FINE"]) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()
    sys.exit(not fine)


if __name__ == "__main__":
    main()
