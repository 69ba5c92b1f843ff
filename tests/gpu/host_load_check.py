"""A model that GPUs share comes to them in parts: the same numbers, without room for all of it.

    torchrun --nproc-per-node 2 -m tests.gpu.host_load_check

Loads random weights in the shape of Qwen3-0.6B once on each GPU and once on the host, makes a
trainer of either, and compares log-probabilities before and after a step; of the second one the
memory that making it takes is bounded too. Rank 0 prints a table; exits with 1 where a number is
outside its bound. `--dry` runs a small shape on CPUs, where memory is not measured.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hone.config.algorithm import AlgorithmConfig
from hone.config.model import LoraConfig, ModelConfig
from hone.config.parallel import ParallelConfig
from hone.config.trainer import TrainerConfig
from hone.distributed.mesh import Mesh
from hone.distributed.processes import processes
from hone.models.adapters import adapt
from hone.models.load import load_model
from hone.models.tiny import SHAPES, make_tiny_model
from hone.trainer.trainer import PolicyTrainer
from tests.gpu.parallel_check import make_rows

MIB = 1 << 20
SLACK = 128 * MIB
CASES: dict[str, dict[str, Any]] = {
    "stage 3": {"zero_stage": 3},
    "stage 2, reference": {"zero_stage": 2, "reference": True},
    "tensor 2": {"tensor_parallel_size": 2, "zero_stage": 3},
    "stage 3, adapters": {"zero_stage": 3, "lora": {"rank": 8}},
    "stage 3, adapters, 4 bits": {"zero_stage": 3, "lora": {"rank": 8, "load_in_4bit": True}},
}
"""`trainer.parallel`, `model.lora` and whether there is a reference."""


def peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def release() -> int:
    """Bytes that are left on the device."""
    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def build(
    cfg: ModelConfig, mesh: Mesh, keys: dict[str, Any], *, on_host: bool
) -> tuple[PolicyTrainer, int]:
    """A trainer, and the values in the largest part of the model that is whole at once."""
    has_reference, lora = keys.get("reference", False), keys.get("lora")
    models = [
        load_model(cfg, device=mesh.device, seed=0, on_host=on_host)
        for _ in range(1 + has_reference)
    ]
    layers = [sum(p.numel() for p in part.parameters()) for part in models[0].base_model.layers]
    num_rest = sum(p.numel() for p in models[0].parameters()) - sum(layers)
    if lora is not None:
        adapt(models[0], LoraConfig.model_validate(lora), seed=0)
    parallel = {k: v for k, v in keys.items() if k not in ("lora", "reference")}
    trainer = PolicyTrainer(
        models[0],
        TrainerConfig.model_validate(
            {"optimizer": {"lr": 0.01, "eps": 0.01}, "parallel": parallel, "compile": False}
        ),
        AlgorithmConfig.model_validate({"kl": {"coef": 0.1 if has_reference else 0.0}}),
        temperature=1.0,
        max_completion_tokens=4096,
        total_steps=10,
        reference=models[1] if has_reference else None,
        mesh=mesh,
    )
    return trainer, max(*layers, num_rest)


def run(cfg: ModelConfig, mesh: Mesh, keys: dict[str, Any], *, on_host: bool) -> dict[str, Any]:
    base = release()
    trainer, num_whole = build(cfg, mesh, keys, on_host=on_host)
    taken = peak(mesh.device) - base
    left = release() - base
    num_params = sum(p.numel() for p in trainer.policy.model.parameters())
    rows = make_rows(8, 256, 500)
    found: dict[str, Any] = {"before": torch.cat(trainer.logprobs(rows))}
    if keys.get("reference"):
        found["before"] = torch.cat([found["before"], *trainer.logprobs(rows, reference=True)])
    if not keys.get("reference"):
        trainer.update(rows)
        found["after"] = torch.cat(trainer.logprobs(rows))
    # Shards stay; one part is whole in float32 while it is cut. The tensor axis cuts first, and
    # keeps its parts in the format that computes.
    bound = left + 4 * num_whole + SLACK
    if keys.get("tensor_parallel_size"):
        bound += 2 * num_params // 2
    return found | {"taken": taken, "left": left, "bound": bound}


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry", action="store_true")
    dry = parser.parse_args().dry
    own = processes()
    device = torch.device("cpu") if dry else torch.device("cuda", own.local_rank)
    if not dry:
        torch.cuda.set_device(device)
    small = {"hidden_size": 64, "num_layers": 2, "vocab_size": 512, "intermediate_size": 128}
    lines, fine = [f"{'':28}{'before':>12}{'after':>12}{'taken MiB':>12}{'bound MiB':>12}"], True
    with tempfile.TemporaryDirectory() as folder:
        shape = dict(SHAPES["qwen3-0.6b"])
        make_tiny_model(Path(folder), **(shape | small if dry else shape), weights=False)
        cfg = ModelConfig(path=folder, init="random")
        for name, keys in CASES.items():
            parallel = {k: v for k, v in keys.items() if k not in ("lora", "reference")}
            mesh = Mesh.join(ParallelConfig(**parallel, timeout_s=300), own, device)
            there, here = (run(cfg, mesh, keys, on_host=on_host) for on_host in (False, True))
            before = difference(there["before"], here["before"])
            # Adapters are drawn where the model lies, which shows after a step.
            is_drawn = "after" not in here or "lora" in keys
            after = 0.0 if is_drawn else difference(there["after"], here["after"])
            fits = here["taken"] <= here["bound"]
            fine = fine and before < 1e-3 and after < 2e-2 and fits
            sizes = (here["taken"] // MIB, here["bound"] // MIB)
            lines.append(f"{name:28}{before:12.2e}{after:12.2e}{sizes[0]:12}{sizes[1]:12}")
        everyones = mesh.gather(fine)
    if mesh.is_first:
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.write("all fine\n" if all(everyones) else f"NOT FINE: by rank {everyones}\n")
    dist.destroy_process_group()
    sys.exit(not all(everyones))


if __name__ == "__main__":
    main()
