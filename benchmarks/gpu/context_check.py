"""Context parallelism on 2 or 4 GPUs of one host: parity with one GPU, time and memory at 128k.

    torchrun --nproc-per-node 4 -m benchmarks.gpu.context_check [SECTION ...] [--seconds N]

Sections:

    attention        one attention against the whole row on each GPU alone, gradients too
    stack            hidden states and gradients of four layers of an 8B model, likewise
    attention-times  forward and backward at 128k tokens, in three packings
    stack-times      the same of the four layers, and memory

Weights are random. A row is outside its bound where the host waited for the device, too.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from time import perf_counter

import torch
import torch.distributed as dist
from benchmarks.gpu.models import build
from benchmarks.gpu.sections import Run
from torch import Tensor
from transformers import PreTrainedModel

from hone.attention import ContextParallel, PackedContext, context_parallel
from hone.attention.backends import packed_attention
from hone.attention.token_shares import padded_tokens, token_ranges
from hone.distributed.joined import JoinedMesh
from hone.distributed.mesh import Mesh
from hone.distributed.settings import AxisSizes
from hone.models.decoder import hidden_states
from hone.trainer.collating import collate
from hone.trainer.context import gather, split
from hone.types import MicroBatch, Row

GIB = 2**30
HEADS, KEY_HEADS, HEAD_DIM, LAYERS = 32, 8, 128, 4
SCALE = HEAD_DIM**-0.5
LONG = 131_072
PARITY = {
    "packed 8k": ((1, 5000, 900, 2291), {}),
    "one 16k": ((16_384,), {}),
    "odd 32k": ((3, 20_001, 7_000, 5_763), {}),
    "window 32k": ((3, 20_001, 7_000, 5_763), {"window": 1500}),
    "short window 8k": ((1, 5000, 900, 2291), {"window": 7}),
}
PACKINGS = {
    "one document": (LONG,),
    "mixed": (65_536, 30_000, 16_384, 9_000, 5_000, 3_000, 1_500, 600, 50, 2),
    "2,048 each": (2048,) * (LONG // 2048),
}
MESHES = {
    2: {"ring 2": {"ring": 2}, "ulysses 2": {"ulysses": 2}},
    4: {
        "ring 4": {"ring": 4},
        "ulysses 4": {"ulysses": 4},
        "ring 2 x ulysses 2": {"ring": 2, "ulysses": 2},
    },
}
MAX_OUTPUT, MAX_GRADIENT = 6e-3, 1e-2
"""Distance over norm, of one attention."""
MAX_HIDDEN, MAX_PARAMETER = 2e-2, 5e-2
"""The same of four layers."""


class Meshes:
    """Of all layouts of so many processes, each made when it is first asked for."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self.run, self.device = run, device
        self.names = list(MESHES[dist.get_world_size()])

    @cache  # noqa: B019  # lives as long as the process
    def of(self, name: str) -> Mesh:
        begun = perf_counter()
        sizes = AxisSizes(**MESHES[dist.get_world_size()][name])
        mesh = JoinedMesh.of_group(sizes, self.device, timeout=timedelta(seconds=60))
        torch.cuda.synchronize()
        self.run.note(f"groups of {name} made", f"{perf_counter() - begun:.1f} s")
        return mesh

    def rows(self, section: str) -> Iterator[tuple[str, Mesh]]:
        """Layouts for which there is time."""
        for name in self.names:
            if self.run.has_time(f"{section}, {name}"):
                yield name, self.of(name)


def distance(found: Tensor, expected: Tensor) -> float:
    """Largest of all ranks, over the norm."""
    value = (found.float() - expected.float()).norm() / expected.float().norm()
    value = value.nan_to_num(torch.inf)  # which a maximum may lose
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


@contextmanager
def no_waiting() -> Generator[set[str]]:
    """The lines at which the host waited for the device, once the block has ended."""
    waited: set[str] = set()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waited
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # The mode itself warns, once, that it does not see all synchronizing operations.
    text = "called a synchronizing CUDA operation"
    waited.update(f"{w.filename}:{w.lineno}" for w in found if text in str(w.message))


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Of the slowest rank, after one call to warm up."""
    work()
    torch.cuda.synchronize()
    dist.barrier()
    start = perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    value = torch.tensor((perf_counter() - start) / repeats, device="cuda")
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def row_of(total: int, seed: int = 0) -> list[Tensor]:
    """q, k, v and the output's gradient of a whole row."""
    draw = torch.Generator("cuda").manual_seed(seed)
    heads = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    return [
        torch.randn(total, h, HEAD_DIM, generator=draw, device="cuda", dtype=torch.bfloat16)
        for h in heads
    ]


def own_tokens(mesh: Mesh, total: int) -> Tensor:
    ranges = token_ranges(
        total,
        ring=mesh.ring.size,
        ulysses=mesh.ulysses.size,
        ring_rank=mesh.ring.rank,
        ulysses_rank=mesh.ulysses.rank,
    )
    return torch.cat([torch.arange(r.start, r.stop) for r in ranges]).cuda()


def contexts(mesh: Mesh, lengths: tuple[int, ...]) -> tuple[PackedContext, PackedContext]:
    """Of the padded row alone, and split."""
    total = padded_tokens(sum(lengths), ring=mesh.ring.size, ulysses=mesh.ulysses.size)
    if total > sum(lengths):
        lengths = (*lengths, total - sum(lengths))
    alone = PackedContext.from_lengths(lengths, device=mesh.device)
    parallel = ContextParallel(ring=mesh.ring, ulysses=mesh.ulysses)
    return alone, dataclasses.replace(alone, parallel=parallel)


def attend(tensors: list[Tensor], context: PackedContext, **options) -> list[Tensor]:
    """Output and gradients."""
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    forward = packed_attention if context.parallel is None else context_parallel.packed_attention
    output = forward(q, k, v, context, scale=SCALE, **options)
    output.backward(tensors[3])
    return [output.detach(), q.grad, k.grad, v.grad]


# ---------------------------------------------------------------- parity


def check_attention(run: Run, meshes: Meshes) -> None:
    run.row("attention, distance from one GPU's", "output", "dq", "dk", "dv")
    for name, mesh in meshes.rows("attention"):
        for label, (lengths, options) in PARITY.items():
            alone, parallel = contexts(mesh, lengths)
            row = row_of(alone.num_tokens)
            own = own_tokens(mesh, alone.num_tokens)
            expected = [x[own] for x in attend(row, alone, **options)]
            part = [x[own] for x in row]
            attend(part, parallel, **options)  # makes connections
            with no_waiting() as waited:
                found = attend(part, parallel, **options)
            errors = [distance(a, b) for a, b in zip(found, expected, strict=True)]
            good = errors[0] <= MAX_OUTPUT and all(e <= MAX_GRADIENT for e in errors[1:])
            good &= not waited
            run.check(f"{name}, {label}", good, *errors, *sorted(waited))


def stack() -> PreTrainedModel:
    """Decoder layers of an 8B model, and a small vocabulary."""
    return build(
        "qwen3-8b",
        num_layers=LAYERS,
        vocab_size=1024,
        max_position_embeddings=LONG,
        tie_word_embeddings=True,
    )


def batch_of(lengths: tuple[int, ...]) -> MicroBatch:
    draw = torch.Generator().manual_seed(1)
    rows = [
        Row(
            id=str(i),
            token_ids=torch.randint(1024, (n,), generator=draw).tolist(),
            loss_mask=[False] + [True] * (n - 1),
        )
        for i, n in enumerate(lengths)
    ]
    return collate(rows, [1.0] * len(rows), "cpu")


def forward_backward(model, share, weights_N: Tensor) -> Tensor:
    """A loss that is linear in a projection of each trained token's hidden state; that, [N]."""
    hidden = hidden_states(model, share.input_ids, share.position_ids, share.context)
    projected = hidden.index_select(0, share.predict_index).float().mean(-1)
    values_N = gather(projected, share)
    (values_N * weights_N).sum().backward()
    return values_N.detach()


def check_stack(run: Run, meshes: Meshes) -> None:
    run.row(f"{LAYERS} layers, 16k, distance from one GPU's", "values", "worst gradient")
    model = stack()
    batch = batch_of((1, 10_000, 2, 4_000, 2_381))
    draw = torch.Generator("cuda").manual_seed(2)
    weights = torch.randn(len(batch.labels), generator=draw, device="cuda")
    expected = forward_backward(model, split(batch, Mesh.alone(meshes.device)), weights)
    gradients = [p.grad.clone() for p in model.parameters()]
    floor = 1e-2 * max(g.float().norm() for g in gradients)
    for name, mesh in meshes.rows("stack"):
        for _ in range(2):  # the first makes connections
            model.zero_grad()
            with no_waiting() as waited:
                share = split(batch, mesh)
                found = forward_backward(model, share, weights)
        error = distance(found, expected)
        worst = 0.0
        for parameter, alone in zip(model.parameters(), gradients, strict=True):
            total = parameter.grad.float()
            dist.all_reduce(total, group=mesh.context.group)
            apart = (total - alone.float()).norm() / max(alone.float().norm(), floor)
            worst = max(worst, apart.nan_to_num(torch.inf).item())
        good = error <= MAX_HIDDEN and worst <= MAX_PARAMETER and not waited
        run.check(name, good, error, worst, *sorted(waited))


# ---------------------------------------------------------------- time and memory


def attention_flops(lengths: tuple[int, ...]) -> float:
    """Forward and backward of one layer: causal scores and values, 3.5 times the forward."""
    return 3.5 * sum(2.0 * n * n * HEADS * HEAD_DIM for n in lengths)


def time_attention(run: Run, meshes: Meshes) -> None:
    run.row(
        "attention, 128k, forward and backward",
        *("one GPU ms", "split ms", "TFLOP/s a GPU", "efficiency", "transfers ms"),
    )
    row = row_of(LONG)
    for packing, lengths in PACKINGS.items():
        if not run.has_time(f"attention-times, {packing}"):
            return
        whole = PackedContext.from_lengths(lengths, device=meshes.device)
        one = seconds(partial(attend, row, whole), repeats=1)
        for name, mesh in meshes.rows(f"attention-times, {packing}"):
            _, parallel = contexts(mesh, lengths)
            part = [x[own_tokens(mesh, LONG)] for x in row]
            many = seconds(partial(attend, part, parallel), repeats=2)
            rate = attention_flops(lengths) / many / mesh.context.size / 1e12
            run.row(
                f"{packing}, {name}",
                *(1e3 * one, 1e3 * many, rate, one / many / mesh.context.size),
                1e3 * time_transfers(mesh),
            )


def time_transfers(mesh: Mesh) -> float:
    """What the ring sends in forward and backward, with nothing computed."""
    if mesh.ring.size == 1:
        return 0.0
    shape = (2, LONG // mesh.ring.size, KEY_HEADS // mesh.ulysses.size, HEAD_DIM)
    kv = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    grad_kv = kv.float()

    def rotate() -> None:
        for _ in range(mesh.ring.size - 1):
            context_parallel._Rotation(kv, mesh.ring).wait()
            context_parallel._Rotation(kv, mesh.ring).wait()
        for _ in range(mesh.ring.size):
            context_parallel._Rotation(grad_kv, mesh.ring).wait()

    return seconds(rotate, repeats=3)


def time_stack(run: Run, meshes: Meshes) -> None:
    run.row(
        f"{LAYERS} layers, 128k, forward and backward",
        *("s", "tokens/s a GPU", "TFLOP/s a GPU", "peak GiB"),
        "(above weights and gradients)",
    )
    model = stack()
    num_weights = sum(p.numel() for p in model.model.layers.parameters())
    for packing, lengths in PACKINGS.items():
        batch = batch_of(lengths)
        weights = torch.ones(len(batch.labels), device="cuda")
        for name, mesh in meshes.rows(f"stack-times, {packing}"):
            share = split(batch, mesh)
            forward_backward(model, share, weights)
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            resting = torch.cuda.memory_allocated()
            dist.barrier()
            start = perf_counter()
            with no_waiting() as waited:
                forward_backward(model, share, weights)
            torch.cuda.synchronize()
            taken = torch.tensor(perf_counter() - start, device="cuda")
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            peak = (torch.cuda.max_memory_allocated() - resting) / GIB
            flops = 6.0 * num_weights * LONG + LAYERS * attention_flops(lengths)
            size, taken_s = mesh.context.size, taken.item()
            run.check(
                f"{packing}, {name}",
                not waited,
                *(taken_s, LONG / taken_s / size, flops / taken_s / size / 1e12, peak),
                *sorted(waited),
            )


def main() -> None:
    run = Run(__doc__, ("attention", "stack", "attention-times", "stack-times"), seconds=240)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    world = dist.get_world_size()
    if world not in MESHES:
        raise SystemExit(f"start 2 or 4 processes, got {world}")
    run.row(f"{world} x {torch.cuda.get_device_name()}, torch {torch.__version__}")
    meshes = Meshes(run, device)
    sys.exit(
        run.go(
            {
                "attention": partial(check_attention, run, meshes),
                "stack": partial(check_stack, run, meshes),
                "attention-times": partial(time_attention, run, meshes),
                "stack-times": partial(time_stack, run, meshes),
            }
        )
    )


if __name__ == "__main__":
    main()
