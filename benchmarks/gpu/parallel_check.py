"""Training over the GPUs of one host: the numbers of one process, and what sharing costs.

    torchrun --nproc-per-node 4 -m benchmarks.gpu.parallel_check [SECTION ...] [--seconds N]

Two GPUs do as well. Every rank also trains the models alone. Sections, of which the first two take
`--shape qwen3.5-0.8b` as well:

    float32   log-probabilities, gradients and weights after two steps of a tiny model, every layout
    bfloat16  the same of four layers of the shape: errors against float32, over those of one GPU in
              bfloat16
    speed     whole steps of 12 layers of the 8B shape, on each GPU alone and shared
    whole     whole steps of all its 36 layers
    host      planning rows and agreeing on the plan
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.gpu.models import build
from benchmarks.gpu.rounding import KIND, WHOLE, errors, split_noise, worst_ratio
from benchmarks.gpu.sections import Run, release
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from hone.algorithms.objective import PolicyObjective
from hone.algorithms.settings import AlgorithmConfig
from hone.distributed.joined import JoinedMesh
from hone.distributed.mesh import Mesh
from hone.distributed.processes import processes
from hone.distributed.settings import AxisSizes, ParallelConfig
from hone.families.registry import spec_of
from hone.models.decoder import head_weight
from hone.models.tiny import SHAPES
from hone.trainer.gathering import whole
from hone.trainer.packing import AttentionCost, plan
from hone.trainer.settings import TrainerConfig
from hone.trainer.sharded import ShardedPolicy
from hone.trainer.trainer import Trainer
from hone.types import Column, Row

GIB = 1 << 30
PROMPT = 64
LIMITS = {"log-prob": 2e-5, "gradient": 1e-4, "worst kind": 1e-3, "weights": 1e-3}
"""Of float32: mean difference of log-probabilities, relative ones of the others."""
TINY: dict[str, Any] = {
    "num_layers": 2,
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TINY_RECURRENT: dict[str, Any] = {
    "num_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
"""Three layers of four are recurrent."""
SMALL: dict[str, Any] = {"num_layers": 4}
LENGTH, TOKENS, PASSES = 2048, 16_384, 2
"""Of timed steps: tokens of a row, of a pass, and passes of each GPU."""
FEW_LAYERS, MANY_LAYERS = 12, 36


def make_rows(num_rows: int, length: int, vocab: int, *, uneven: bool = False) -> list[Row]:
    generator = torch.Generator().manual_seed(num_rows)
    rows: list[Row] = []
    for index in range(num_rows):
        num_tokens = length - 37 * (index % 7) if uneven else length
        num_trained = num_tokens - PROMPT
        rows.append(
            Row(
                id=f"r{index}",
                group_id=f"g{index // 4}",
                token_ids=torch.randint(vocab, (num_tokens,), generator=generator).tolist(),
                loss_mask=[False] * PROMPT + [True] * num_trained,
                columns={
                    "advantages": Column(
                        torch.randn(1, generator=generator).expand(num_trained).clone()
                    )
                },
            )
        )
    return rows


def make_trainer(
    model: PreTrainedModel, mesh: Mesh, parallel: dict[str, Any], **settings: Any
) -> Trainer:
    cfg = TrainerConfig.model_validate(
        {"optimizer": {"lr": 0.01, "eps": 0.01}, "parallel": parallel, **settings}
    )
    return Trainer(
        model,
        cfg,
        PolicyObjective(AlgorithmConfig(), max_completion_tokens=4096),
        total_steps=100,
        mesh=mesh,
    )


def layouts(size: int) -> dict[str, dict[str, Any]]:
    """Settings of `trainer.parallel` for so many processes."""
    found: dict[str, dict[str, Any]] = {
        **{f"stage {stage}": {"zero_stage": stage} for stage in range(4)},
        "tensor 2": {"tensor_parallel_size": 2, "zero_stage": 3},
        "ulysses 2": {"ulysses_size": 2, "zero_stage": 3},
        "ring 2": {"ring_size": 2, "zero_stage": 3},
    }
    if size == 4:
        found["stage 2, two copies"] = {"zero_stage": 2, "fsdp_size": 2}
    return found


def is_hybrid(shape: str) -> bool:
    return spec_of(SHAPES[shape]["family"]).is_hybrid


def small_model(shape: str, *, is_tiny: bool) -> dict[str, Any]:
    """Arguments of `build`."""
    if not is_tiny:
        return {"shape": shape, **SMALL}
    return {"shape": shape, **TINY, **(TINY_RECURRENT if is_hybrid(shape) else {})}


class Meshes:
    """Of all processes; each is made when it is first asked for."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self.run, self.device = run, device
        self.size = dist.get_world_size()

    def of(self, keys: dict[str, Any]) -> Mesh:
        return self._of_sizes(AxisSizes.of(ParallelConfig(**keys), self.size))

    @cache  # noqa: B019  # lives as long as the process
    def _of_sizes(self, sizes: AxisSizes) -> Mesh:
        begun = time.perf_counter()
        mesh = JoinedMesh.of_group(sizes, self.device, timeout=timedelta(seconds=60))
        self.run.note(f"groups of {sizes} made in {time.perf_counter() - begun:.1f} s")
        return mesh

    def layouts(self, section: str) -> Iterator[tuple[str, Mesh, dict[str, Any]]]:
        """Those for which there is time."""
        for name, keys in layouts(self.size).items():
            if "ring_size" in keys and is_hybrid(self.run.args.shape):
                continue  # refused: the state of a row's first part is needed by its second
            if self.run.has_time(f"{section}, {name}"):
                yield name, self.of(keys), keys


# ---------------------------------------------------------------- the same numbers

Numbers = dict[str, dict[str, Tensor]]
"""`logprobs`, and `gradients` and `moves` of the weights by name."""


def numbers(
    mesh: Mesh,
    parallel: dict[str, Any],
    model: dict[str, Any],
    dtype: torch.dtype,
    **settings: Any,
) -> tuple[Numbers, torch.dtype]:
    """Of the model on this mesh, and the format that its passes compute in."""
    rows = make_rows(11, 512, 1000, uneven=True)
    settings = {"max_tokens_per_microbatch": 1024, "compile": False, **settings}
    made = build(**model, dtype=dtype, device=mesh.device)
    trainer = make_trainer(made, mesh, parallel, **settings)
    policy = trainer.policy
    computes = policy.dtype
    if isinstance(policy, ShardedPolicy):
        computes = policy.sharded(lambda: head_weight(policy.model).dtype)
        policy.sharded.free()
    before = {n: whole(t.detach()).clone() for n, t in policy.masters.items()}
    logprobs = torch.cat(trainer.logprobs(rows))
    trainer.forward_backward(rows)
    gradients = {n: whole(g).clone() for n, g in policy.gradients.items()}
    policy.drop_gradient()
    for _ in range(2):
        trainer.update(rows)
    moves = {n: whole(t.detach()) - before[n] for n, t in policy.masters.items()}
    found = {"logprobs": {"logprobs": logprobs}, "gradients": gradients, "moves": moves}
    return found, computes


class Alone:
    """Numbers of this GPU alone, each found once."""

    def __init__(self, device: torch.device, shape: str) -> None:
        self.mesh, self.shape = Mesh.alone(device), shape

    @cache  # noqa: B019  # lives as long as the process
    def numbers(self, *, is_tiny: bool, dtype: torch.dtype) -> Numbers:
        return numbers(self.mesh, {}, small_model(self.shape, is_tiny=is_tiny), dtype)[0]


def mean_gap(found: Numbers, wanted: Numbers) -> float:
    return float((found["logprobs"]["logprobs"] - wanted["logprobs"]["logprobs"]).abs().mean())


def check_float32(run: Run, meshes: Meshes, alone: Alone) -> None:
    run.row(f"float32, {meshes.size} GPUs against one", *LIMITS)
    wanted = alone.numbers(is_tiny=True, dtype=torch.float32)
    for name, mesh, keys in meshes.layouts("float32"):
        found, _ = numbers(mesh, keys, small_model(alone.shape, is_tiny=True), torch.float32)
        off = errors(found["gradients"], wanted["gradients"])
        moved = errors(found["moves"], wanted["moves"])["all"]
        values = (mean_gap(found, wanted), off["all"], max(off.values()), moved)
        good = all(v <= limit for v, limit in zip(values, LIMITS.values(), strict=True))
        run.check(f"float32, tiny, {name}", good, *values)


def check_bfloat16(run: Run, meshes: Meshes, alone: Alone) -> None:
    run.row(
        f"bfloat16, errors of {meshes.size} GPUs / one",
        *("log-prob", "ratio", "gradient", "ratio", "moves", "ratio", "worst kind", "its ratio"),
    )
    for name, mesh, keys in meshes.layouts("bfloat16"):
        check_noise(run, f"bfloat16, {alone.shape}, {name}", mesh, keys, alone, is_tiny=False)
    keys = {"zero_stage": 3}
    if run.has_time("bfloat16, compiled"):
        name = "bfloat16, tiny, stage 3, compiled, recompute"
        settings = {"compile": True, "recompute": "full"}
        check_noise(run, name, meshes.of(keys), keys, alone, is_tiny=True, **settings)


def check_noise(
    run: Run,
    name: str,
    mesh: Mesh,
    keys: dict[str, Any],
    alone: Alone,
    *,
    is_tiny: bool,
    **settings: Any,
) -> None:
    """Errors against float32 of a layout, over those of one GPU."""
    wanted = alone.numbers(is_tiny=is_tiny, dtype=torch.float32)
    plain = alone.numbers(is_tiny=is_tiny, dtype=torch.bfloat16)
    model = small_model(alone.shape, is_tiny=is_tiny)
    found, computes = numbers(mesh, keys, model, torch.bfloat16, **settings)
    gaps = [mean_gap(one, wanted) for one in (found, plain)]
    own, other = (errors(one["gradients"], wanted["gradients"]) for one in (found, plain))
    moves = [errors(one["moves"], wanted["moves"])["all"] for one in (found, plain)]
    ratios = [gaps[0] / gaps[1], own["all"] / other["all"], moves[0] / moves[1]]
    worst, kind = worst_ratio(own, other)
    noise = split_noise(max(mesh.tensor.size, mesh.ring.size, 2))
    # Moves are not linear in gradients: AdamW divides by their size.
    limits = (WHOLE * noise, WHOLE * noise, KIND * noise)
    good = all(ratio <= limit for ratio, limit in zip(ratios, limits, strict=True))
    good &= worst <= KIND * noise and computes == torch.bfloat16
    cells = (gaps[0], ratios[0], own["all"], ratios[1], moves[0], ratios[2], kind, worst)
    run.check(name, good, *cells, *([] if computes == torch.bfloat16 else [computes]))


# ---------------------------------------------------------------- speed


def shape_of_steps(num_layers: int) -> dict[str, Any]:
    return {"shape": "qwen3-8b", "num_layers": num_layers}


COLUMNS = (
    *("tokens/s/GPU", "s", "TFLOP/s/GPU", "peak GiB", "of one GPU", "first s", "graphs"),
    "gather GB/s",
)
"""Of steps after the first, which compiles so many graphs; of gathering all weights."""


def time_steps(
    run: Run,
    name: str,
    mesh: Mesh,
    parallel: dict[str, Any],
    model: dict[str, Any],
    *,
    one: float | None = None,
) -> float | None:
    """Tokens/s and GPU of whole optimizer steps; `one` is that of a GPU alone."""
    if not run.has_time(name):
        return None
    release()
    before = counters["stats"]["unique_graphs"]
    num_rows = mesh.data.size * PASSES * TOKENS // LENGTH
    trainer = make_trainer(
        build(**model, device=mesh.device),
        mesh,
        parallel,
        recompute="full",
        max_tokens_per_microbatch=TOKENS,
    )
    rows = make_rows(num_rows, LENGTH, 1000)
    num_parameters = sum(p.numel() for p in trainer.policy.parameters.values())

    def step() -> float:
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        trainer.update(rows)
        torch.cuda.synchronize()
        return largest(time.perf_counter() - start)

    first, seconds = step(), min(step() for _ in range(2))
    per_gpu = num_rows * LENGTH / seconds / mesh.world.size
    peak = largest(torch.cuda.max_memory_allocated())
    gathered = float("nan")
    if mesh.world.size > 1:
        start = time.perf_counter()
        num_bytes = sum(t.nbytes for _, t in trainer.named_weights())
        torch.cuda.synchronize()
        gathered = num_bytes / (time.perf_counter() - start) / 1e9
    share = per_gpu / one if one else float("nan")
    rate = 6 * num_parameters * per_gpu / 1e12
    graphs = counters["stats"]["unique_graphs"] - before
    run.row(name, per_gpu, seconds, rate, peak / GIB, share, first, graphs, gathered)
    return per_gpu


def largest(value: float) -> float:
    """Of all processes."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return max(values)


def time_few_layers(run: Run, meshes: Meshes, alone: Alone) -> None:
    run.row(f"steps, rows of {LENGTH}, recompute full, AdamW", *COLUMNS)
    few = shape_of_steps(FEW_LAYERS)
    one = time_steps(run, f"{FEW_LAYERS} layers, 1 GPU", alone.mesh, {}, few)
    for name, keys in (
        ("stage 3", {"zero_stage": 3}),
        ("stage 2", {"zero_stage": 2}),
    ):
        label = f"{FEW_LAYERS} layers, {meshes.size} GPUs, {name}"
        time_steps(run, label, meshes.of(keys), keys, few, one=one)


def time_many_layers(run: Run, meshes: Meshes) -> None:
    run.row(f"steps, rows of {LENGTH}, recompute full, AdamW", *COLUMNS)
    for stage in (3, 2):
        keys = {"zero_stage": stage}
        label = f"{MANY_LAYERS} layers, {meshes.size} GPUs, stage {stage}"
        time_steps(run, label, meshes.of(keys), keys, shape_of_steps(MANY_LAYERS))


def time_host(run: Run, meshes: Meshes) -> None:
    rows = make_rows(2048, 512, 1000, uneven=True)
    cost = AttentionCost.of(num_parameters=8_000_000_000, num_layers=36, attention_width=4096)
    start = time.perf_counter()
    plan(rows, max_tokens=16_384, num_ranks=8, cost=cost)
    run.row("plan of 2,048 rows, ms", 1e3 * (time.perf_counter() - start))
    world = meshes.of({"zero_stage": 3})
    start = time.perf_counter()
    for _ in range(10):
        world.agree("nothing", "of importance")
    run.row("agreement, ms", 1e2 * (time.perf_counter() - start))


def main() -> None:
    def add_flags(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES)

    names = ("float32", "bfloat16", "speed", "whole", "host")
    run = Run(__doc__, names, seconds=300, add_flags=add_flags)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    own = processes()
    device = torch.device("cuda", own.local_rank)
    torch.cuda.set_device(device)
    if own.world_size not in (2, 4):
        raise SystemExit(f"start 2 or 4 processes, got {own.world_size}")
    JoinedMesh.join(ParallelConfig(), own, device)
    run.row(f"{own.world_size} x {torch.cuda.get_device_name()}, torch {torch.__version__}")
    meshes, alone = Meshes(run, device), Alone(device, run.args.shape)
    sys.exit(
        run.go(
            {
                "float32": partial(check_float32, run, meshes, alone),
                "bfloat16": partial(check_bfloat16, run, meshes, alone),
                "speed": partial(time_few_layers, run, meshes, alone),
                "whole": partial(time_many_layers, run, meshes),
                "host": partial(time_host, run, meshes),
            }
        )
    )


if __name__ == "__main__":
    main()
