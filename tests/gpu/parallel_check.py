"""Training over the GPUs of one host: the numbers of one process, and what sharing costs.

    torchrun --nproc-per-node 4 -m tests.gpu.parallel_check

Two GPUs do as well. First every rank also trains small bfloat16 models alone: log-probabilities,
gradients and weights after two steps must be the same in every stage, for every axis. Then whole
steps of a 12-layer model in the shape of Qwen3-8B are timed, on each GPU alone and shared, and
those of all 36 layers. Weights are random. Rank 0 prints tables; exits with 1 where a number is
outside its bound. `--dry` runs small shapes on CPUs.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hone.attention import ATTENTION_NAME
from hone.config.algorithm import AlgorithmConfig
from hone.config.parallel import ParallelConfig
from hone.config.trainer import TrainerConfig
from hone.distributed.mesh import Mesh
from hone.distributed.processes import processes
from hone.models.decoder import head_weight
from hone.models.tiny import SHAPES
from hone.trainer.packing import AttentionCost, plan
from hone.trainer.trainer import PolicyTrainer
from hone.types import Trajectory

GIB, STARTED, SECONDS = 1 << 30, time.perf_counter(), 110.0
PROMPT = 64
LIMITS = {"mean log-prob": 2e-3, "gradient": 2e-2, "worst gradient": 8e-2, "weights": 5e-2}
"""Mean absolute and relative differences. Sharding alone changes no bit of a pass; attention's
backward and other splits of the sums do."""


def build(shape: str, num_layers: int, device: torch.device, **fields: Any) -> PreTrainedModel:
    known = dict(SHAPES[shape])
    config = AutoConfig.for_model(
        known["family"],
        **{
            "vocab_size": known["vocab_size"],
            "hidden_size": known["hidden_size"],
            "intermediate_size": known["intermediate_size"],
            "num_hidden_layers": num_layers,
            "num_attention_heads": known["num_heads"],
            "num_key_value_heads": known["num_kv_heads"],
            "head_dim": known["head_dim"],
            "tie_word_embeddings": known["tie_word_embeddings"],
            "max_position_embeddings": known["max_position_embeddings"],
            **fields,
        },
    )
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME
        )
    return model.eval()


def make_rows(num_rows: int, length: int, vocab: int, *, uneven: bool = False) -> list[Trajectory]:
    generator = torch.Generator().manual_seed(num_rows)
    rows: list[Trajectory] = []
    for index in range(num_rows):
        num_tokens = length - 37 * (index % 7) if uneven else length
        num_trained = num_tokens - PROMPT
        rows.append(
            Trajectory(
                id=f"r{index}",
                group_id=f"g{index // 4}",
                token_ids=torch.randint(vocab, (num_tokens,), generator=generator).tolist(),
                loss_mask=[False] * PROMPT + [True] * num_trained,
                advantages=torch.randn(1, generator=generator).expand(num_trained).clone(),
            )
        )
    return rows


def make_trainer(
    model: PreTrainedModel, mesh: Mesh, parallel: dict[str, Any], **settings: Any
) -> PolicyTrainer:
    cfg = TrainerConfig.model_validate(
        {"optimizer": {"lr": 0.01, "eps": 0.01}, "parallel": parallel, **settings}
    )
    return PolicyTrainer(
        model,
        cfg,
        AlgorithmConfig(),
        temperature=1.0,
        max_completion_tokens=4096,
        total_steps=100,
        mesh=mesh,
    )


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


class Table:
    """Printed by the first rank, last."""

    def __init__(self, mesh: Mesh, title: str, *columns: str) -> None:
        self._mesh, self._lines = mesh, [title, self._line("", *columns)]

    def add(self, name: str, *cells: object) -> None:
        self._lines.append(self._line(name, *cells))
        self.note(self._lines[-1])

    def note(self, text: str) -> None:
        if self._mesh.is_first:
            sys.stderr.write(f"{time.perf_counter() - STARTED:6.1f} s  {text}\n")
            sys.stderr.flush()

    def print(self) -> None:
        if self._mesh.is_first:
            sys.stdout.write("\n".join([*self._lines, "", ""]))

    def _line(self, name: str, *cells: object) -> str:
        texts = [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells]
        return f"{name:44}" + "".join(f"{text:>15}" for text in texts)


def out_of_time(mesh: Mesh) -> bool:
    return max(mesh.gather(time.perf_counter() - STARTED)) > SECONDS


# ---------------------------------------------------------------- the same numbers


def relative(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, float]:
    """Differences of named tensors over all their norms, and the largest of one alone."""
    gaps = {n: float((actual[n].float() - want.float()).norm()) for n, want in expected.items()}
    norms = {n: float(want.float().norm()) for n, want in expected.items()}
    total = sum(gap**2 for gap in gaps.values()) ** 0.5 / sum(n**2 for n in norms.values()) ** 0.5
    return total, max(gaps[n] / max(norms[n], 1e-3 * max(norms.values())) for n in gaps)


def check(
    table: Table,
    name: str,
    mesh: Mesh,
    parallel: dict[str, Any],
    model: dict[str, Any],
    **settings: Any,
) -> bool:
    """One layout against the same model alone."""
    rows = make_rows(11, 512, 1000, uneven=True)
    settings = {"max_tokens_per_microbatch": 1024, "compile": False, **settings}
    found: list[dict[str, Any]] = []
    for own in (Mesh.alone(mesh.device), mesh):
        trainer = make_trainer(build(**model, device=mesh.device), own, parallel, **settings)
        if own is mesh:
            sharded = trainer.policy.sharded
            dtype = sharded(lambda t=trainer: head_weight(t.policy.model).dtype)
            sharded.free()
            assert dtype == torch.bfloat16, f"{name}: passes compute in {dtype}"
        before = {n: whole(t.detach()).clone() for n, t in trainer.policy.masters.items()}
        logprobs = torch.cat(trainer.logprobs(rows))
        trainer.forward_backward(rows)
        gradients = {n: whole(g).clone() for n, g in trainer.policy.gradients.items()}
        trainer.policy.drop_gradient()
        for _ in range(2):
            trainer.update(rows)
        moved = {n: whole(t.detach()) - before[n] for n, t in trainer.policy.masters.items()}
        found.append({"logprobs": logprobs, "gradients": gradients, "moved": moved})
        del trainer
        release()
    alone, group = found
    total, worst = relative(group["gradients"], alone["gradients"])
    values = {
        "mean log-prob": float((group["logprobs"] - alone["logprobs"]).abs().mean()),
        "gradient": total,
        "worst gradient": worst,
        "weights": relative(group["moved"], alone["moved"])[0],
    }
    fine = all(values[key] <= limit for key, limit in LIMITS.items())
    everywhere = all(mesh.gather(fine))
    table.add(name, *values.values(), "" if everywhere else "OUTSIDE")
    return everywhere


def check_layouts(meshes: dict[str, tuple[Mesh, dict[str, Any]]], table: Table, dry: bool) -> bool:
    fields = {"vocab_size": 1024} | (
        {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "head_dim": 16}
    )
    tiny = {"shape": "qwen3-0.6b", "num_layers": 2, **fields}
    small = {"shape": "qwen3-0.6b", "num_layers": 4}
    fine = True
    for name, (mesh, parallel) in meshes.items():
        fine &= check(table, f"tiny, {name}", mesh, parallel, tiny)
        if not dry and not out_of_time(mesh):
            fine &= check(table, f"0.6B of 4 layers, {name}", mesh, parallel, small)
    mesh, parallel = meshes["stage 3"]
    compiled = {"compile": not dry, "recompute": "full"}
    fine &= check(table, "tiny, stage 3, compiled, recompute", mesh, parallel, tiny, **compiled)
    return fine


# ---------------------------------------------------------------- speed


def time_steps(
    table: Table,
    name: str,
    mesh: Mesh,
    parallel: dict[str, Any],
    model: dict[str, Any],
    *,
    length: int,
    tokens: int,
    passes: int,
    one: float | None = None,
    world: Mesh,
) -> float:
    """Tokens/s and GPU of whole optimizer steps; `one` is that of a GPU alone."""
    if out_of_time(world):
        table.add(name, "no time left")
        return 0.0
    release()
    num_rows = mesh.data.size * passes * tokens // length
    trainer = make_trainer(
        build(**model, device=mesh.device),
        mesh,
        parallel,
        recompute="full",
        max_tokens_per_microbatch=tokens,
    )
    rows = make_rows(num_rows, length, 1000)
    num_parameters = sum(p.numel() for p in trainer.policy.parameters.values())

    def step() -> float:
        world.gather(None)
        synchronize()
        start = time.perf_counter()
        trainer.update(rows)
        synchronize()
        return max(world.gather(time.perf_counter() - start))

    first, seconds = step(), min(step() for _ in range(2))
    per_gpu = num_rows * length / seconds / mesh.world.size
    peak = max(world.gather(memory_peak()))
    gathered = float("nan")
    if mesh.world.size > 1:
        start = time.perf_counter()
        num_bytes = sum(t.nbytes for _, t in trainer.named_weights())
        synchronize()
        gathered = num_bytes / (time.perf_counter() - start) / 1e9
    table.add(
        name,
        per_gpu,
        seconds,
        6 * num_parameters * per_gpu / 1e12,
        peak / GIB,
        f"{per_gpu / one:.3f}" if one else "",
        first,
        gathered,
    )
    return per_gpu


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def memory_peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true")
    dry = parser.parse_args().dry
    own = processes()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    device = torch.device("cpu") if dry else torch.device("cuda", own.local_rank)
    if not dry:
        torch.cuda.set_device(device)
    world = Mesh.join(ParallelConfig(zero_stage=3), own, device)
    size, timeout = own.world_size, {"timeout_s": 60.0}
    layouts: dict[str, dict[str, Any]] = {
        **{f"stage {stage}": {"zero_stage": stage} for stage in range(4)},
        "tensor 2": {"tensor_parallel_size": 2, "zero_stage": 3},
        "ulysses 2": {"ulysses_size": 2, "zero_stage": 3},
        "ring 2": {"ring_size": 2, "zero_stage": 3},
    }
    if size == 4:
        layouts["stage 2, two copies"] = {"zero_stage": 2, "fsdp_size": 2}
    meshes: dict[str, tuple[Mesh, dict[str, Any]]] = {}
    for name, keys in layouts.items():
        meshes[name] = Mesh.join(ParallelConfig(**keys, **timeout), own, device), keys

    same = Table(world, f"{size} GPUs against one", *LIMITS, "")
    fine = check_layouts(meshes, same, dry)

    speed = Table(
        world,
        "whole steps, rows of 2,048 tokens, recompute full, AdamW",
        *("tokens/s/GPU", "s", "TFLOP/s/GPU", "peak GiB", "of one GPU", "first s", "gather GB/s"),
    )
    shape: dict[str, Any] = {"shape": "qwen3-8b"}
    work: dict[str, Any] = {"length": 2048, "tokens": 16384, "passes": 2, "world": world}
    layers, many = 12, 36
    if dry:
        shape |= {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128}
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        work |= {"length": 128, "tokens": 256}
        layers, many = 2, 3
    alone = Mesh.alone(device)
    few = shape | {"num_layers": layers}
    one = time_steps(speed, f"{layers} layers, 1 GPU", alone, {}, few, **work)
    for name, keys in (
        ("stage 3", {"zero_stage": 3}),
        ("stage 2", {"zero_stage": 2}),
        ("stage 3, prefetch", {"zero_stage": 3, "forward_prefetch": True}),
    ):
        mesh = meshes[name.removesuffix(", prefetch")][0]
        label = f"{layers} layers, {size} GPUs, {name}"
        time_steps(speed, label, mesh, keys, few, one=one, **work)
    for name in ("stage 3", "stage 2"):
        mesh, keys = meshes[name]
        label = f"{many} layers, {size} GPUs, {name}"
        time_steps(speed, label, mesh, keys, shape | {"num_layers": many}, **work)

    rows = make_rows(2048, 512, 1000, uneven=True)
    cost = AttentionCost.of(num_parameters=8_000_000_000, num_layers=36, attention_width=4096)
    start = time.perf_counter()
    plan(rows, max_tokens=16384, num_ranks=8, cost=cost)
    planned = 1e3 * (time.perf_counter() - start)
    start = time.perf_counter()
    for _ in range(10):
        world.agree("nothing", "of importance")
    agreed = 1e2 * (time.perf_counter() - start)
    same.print()
    speed.print()
    if world.is_first:
        sys.stdout.write(f"plan of 2,048 rows {planned:.1f} ms, agreement {agreed:.2f} ms\n")
        sys.stdout.write("all numbers agree\n" if fine else "SOME NUMBERS ARE OUTSIDE\n")
    dist.destroy_process_group()
    sys.exit(not fine)


if __name__ == "__main__":
    main()
