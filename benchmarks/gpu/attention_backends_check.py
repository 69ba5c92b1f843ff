"""Compares the CUDA backends of packed attention: FlashAttention 2 and 4, and cuDNN where it fits.

`python -m benchmarks.gpu.attention_backends_check` needs the extra `flash`. It prints what
compiling costs, errors against float64 and, on long rows, between the backends, whether new
packings compile anything, the time a call costs the host, and last TFLOP/s forward and backward.
cuDNN is torch's dense one, so it runs where all rows are equally long. Exits with 1 where an error
is above its limit or a new packing compiles.
"""

from __future__ import annotations

import random
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from benchmarks.gpu.attention_check import DEVICE, LIMITS, attend, error, normal, token_error
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hone.attention import PackedContext, flash, flash4

BACKENDS = {"FA2": flash.packed_attention, "FA4": flash4.packed_attention}
HEADS = [(16, 8, 128), (32, 8, 128), (14, 2, 64)]
SMALL = (1, 257, 64, 513, 16, 1, 300)
MANY = (70,) * 300
ROWS = {
    "8 x 2048": (2048,) * 8,
    "1 x 16384": (16384,),
    "32 x 512": (512,) * 32,
    "mixed 16384": tuple(random.Random(0).choices(range(64, 1985), k=16)),
}
NEW_PACKINGS = 20
COMPILES = 0.5
"""Seconds above which a call has compiled something."""
CLOSE = 1e-2
"""Largest relative difference, in the 2-norm, of two backends in bfloat16."""


def inputs(lengths, heads, dtype=torch.bfloat16) -> tuple[list[Tensor], Tensor, PackedContext]:
    """Queries, keys and values as a layer has them, views of [H, T, D]; the output's gradient."""
    num_heads, num_kv_heads, head_dim = heads
    total = sum(lengths)
    qkv = [
        normal(h, total, head_dim, dtype=dtype, seed=i).transpose(0, 1).requires_grad_()
        for i, h in enumerate((num_heads, num_kv_heads, num_kv_heads))
    ]
    grad = normal(total, num_heads, head_dim, dtype=dtype, seed=3)
    return qkv, grad, PackedContext.from_lengths(lengths, device=DEVICE)


def run(backend: str, lengths, heads, *, dtype=torch.bfloat16, window=None) -> list[Tensor]:
    """Output and gradients of queries, keys and values."""
    qkv, grad, context = inputs(lengths, heads, dtype)
    output = BACKENDS[backend](*qkv, context, scale=heads[2] ** -0.5, window=window)
    return [output.detach(), *torch.autograd.grad(output, qkv, grad)]


def exact(lengths, heads, *, dtype=torch.bfloat16, window=None) -> list[Tensor]:
    qkv, grad, _ = inputs(lengths, heads, dtype)
    qkv = [x.detach().double().requires_grad_() for x in qkv]
    pieces = zip(*(x.split(list(lengths)) for x in qkv), strict=True)
    output = torch.cat([attend(*p, scale=heads[2] ** -0.5, window=window) for p in pieces])
    return [output.detach(), *torch.autograd.grad(output, qkv, grad.double())]


def wall(call) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def show(good: bool, text: str) -> bool:
    print("ok  " if good else "FAIL", text, flush=True)
    return good


def check_small(lengths, heads, **options) -> bool:
    """Errors of FlashAttention 4 against float64, beside those of FlashAttention 2."""
    seconds = wall(lambda: run("FA4", lengths, heads, **options))
    expected = exact(lengths, heads, **options)
    errors = {}
    for name in BACKENDS:
        actual = run(name, lengths, heads, **options)
        errors[name] = [token_error(actual[0], expected[0])]
        errors[name] += [error(a, e) for a, e in zip(actual[1:], expected[1:], strict=True)]
    limit = LIMITS[options.get("dtype", torch.bfloat16)]
    described = ", ".join(f"{k} {' '.join(f'{x:.1e}' for x in v)}" for k, v in errors.items())
    return show(
        max(errors["FA4"]) <= limit,
        f"{len(lengths):4} rows {heads!s:13} {options!s:34} first call {seconds:5.2f} s; "
        f"out dq dk dv: {described}",
    )


def check_large(name: str, heads) -> bool:
    ours, theirs = (run(backend, ROWS[name], heads) for backend in ("FA4", "FA2"))
    distances = [
        ((a.double() - b.double()).norm() / b.double().norm()).item()
        for a, b in zip(ours, theirs, strict=True)
    ]
    described = " ".join(f"{x:.1e}" for x in distances)
    return show(max(distances) <= CLOSE, f"{name:12} {heads!s:13} FA4 - FA2: {described}")


def check_new_packings(heads) -> bool:
    """The slowest call of packings never seen before, forward and backward."""
    draw = random.Random(1)
    packings = [
        [draw.randint(150, 4000) for _ in range(draw.randint(1, 40))] for _ in range(NEW_PACKINGS)
    ]
    slowest = max(wall(lambda p=p: run("FA4", p, heads)) for p in packings)
    return show(slowest < COMPILES, f"{NEW_PACKINGS} new packings: the slowest {slowest:.3f} s")


def check_reproducible(heads) -> bool:
    """Gradients of two runs, as they are and when deterministic ones are asked for."""
    alike = []
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        first, second = (run("FA4", ROWS["8 x 2048"], heads) for _ in range(2))
        alike.append(all(torch.equal(a, b) for a, b in zip(first, second, strict=True)))
    torch.use_deterministic_algorithms(False)
    return show(alike[1], f"two runs bit-equal: {alike[0]}, deterministic: {alike[1]}")


def host_seconds(backend: str, heads) -> float:
    """Time of the host for a forward and backward, the device left behind."""
    qkv, grad, context = inputs((512,) * 4, heads)
    for repeats in (3, 50):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            output = BACKENDS[backend](*qkv, context, scale=heads[2] ** -0.5, window=None)
            torch.autograd.grad(output, qkv, grad)
        elapsed = time.perf_counter() - start
    return elapsed / repeats


def device_seconds(call, repeats: int = 10) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000)  # the host runs ahead, so that its time is not measured
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def dense_call(lengths, heads):
    """cuDNN's attention of equally long rows, a key head for each query head, and its inputs."""
    num_heads, _, head_dim = heads
    shape = (len(lengths), lengths[0], num_heads, head_dim)
    qkv = [
        normal(*shape, dtype=torch.bfloat16, seed=i).transpose(1, 2).requires_grad_()
        for i in range(3)
    ]

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*qkv, is_causal=True)

    return call, qkv


def rates(backend: str, lengths, heads) -> tuple[float, float]:
    """TFLOP/s forward and backward: the products of the lower triangle, 2 of them and 5."""
    if backend == "cuDNN":
        call, qkv = dense_call(lengths, heads)
    else:
        qkv, _, context = inputs(lengths, heads)

        def call() -> Tensor:
            return BACKENDS[backend](*qkv, context, scale=heads[2] ** -0.5, window=None)

    output = call()
    grad = torch.randn_like(output)
    forward = device_seconds(call)
    backward = device_seconds(lambda: torch.autograd.grad(output, qkv, grad, retain_graph=True))
    product = heads[0] * heads[2] * sum(n * n for n in lengths)
    return 2 * product / forward / 1e12, 5 * product / backward / 1e12


def main() -> int:
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    if not flash4.is_usable(DEVICE, 128):
        print("FlashAttention 4 is not usable here: install the extra `flash`")
        return 1
    print(f"import {wall(flash4._kernels):.1f} s")
    good = []
    for heads in HEADS:
        good.append(check_small(SMALL, heads))
    good.append(check_new_packings(HEADS[0]))
    good += [check_large(name, heads) for heads in HEADS[:2] for name in ROWS]
    for name in BACKENDS:
        print(f"{name}: {1e6 * host_seconds(name, HEADS[0]):.0f} us of the host a call and back")
    print(
        f"{'TFLOP/s forward, backward':27}" + "".join(f"{x:>14}" for x in ("FA2", "FA4", "cuDNN"))
    )
    for heads in HEADS:
        for name, lengths in ROWS.items():
            is_dense = len(set(lengths)) == 1
            shown = [rates(b, lengths, heads) for b in (*BACKENDS, *["cuDNN"] * is_dense)]
            cells = "".join(f"{f:8.0f} {b:5.0f}" for f, b in shown)
            print(f"{name:13} {heads!s:13}{cells}", flush=True)
    # Most of these compile kernels of their own.
    good.append(check_small(SMALL, HEADS[0], window=100))
    good.append(check_small(MANY, HEADS[0]))
    good.append(check_small((40, 1, 30), HEADS[0]))
    good.append(check_small(SMALL, HEADS[0], dtype=torch.float16))
    good.append(check_reproducible(HEADS[0]))
    print(f"{sum(good)} of {len(good)} checks passed")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
