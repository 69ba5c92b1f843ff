"""Exact mode on one GPU: equal bits, accuracy, and time of every tile that could be chosen.

`python -m benchmarks.gpu.exact_check` compares bits in bfloat16 at the shapes of Qwen3 0.6B and 8B,
errors against float64, then sweeps tiles beside cuBLAS and the ordinary attention. Tiles marked
`bits differ` may not be chosen. Exits with 1 where a default's bits differ or an error is above its
limit.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from time import perf_counter

import torch
import torch.nn.functional as F
from benchmarks.gpu.attention_check import attend, error, normal, token_error
from torch import Tensor

from hone.attention import PackedContext, PagedContext, exact, flash, triton_decode
from hone.attention.exact import RowTile
from hone.models import exact_kernel
from hone.models.exact import linear
from hone.models.exact_kernel import Tile, matmul

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
BANDWIDTH = 4.29e12
MATRIX_RATE = 790e12
PROJECTIONS = {
    "0.6B qkv": (4096, 1024),
    "0.6B o": (1024, 2048),
    "0.6B gate_up": (6144, 1024),
    "0.6B down": (1024, 3072),
    "0.6B head": (151936, 1024),
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate_up": (24576, 4096),
    "8B down": (4096, 12288),
    "8B head": (151936, 4096),
}
ROWS = (1, 7, 32, 255, 256, 1024, 8192)
SCHEDULES = ((1, False), (2, False), (2, True), (4, False), (4, True))
"""Parts of K, and whether each has its own program."""
TILES = (
    *exact_kernel.TILES,
    Tile(64, 16, 128, 4, 6),
    Tile(64, 64, 64, 4, 6),
    Tile(64, 128, 64, 4, 6),
    Tile(128, 64, 64, 4, 5),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 128, 64, 4, 4),
    Tile(128, 256, 64, 8, 3),
)
HEADS = ((16, 8, 128), (32, 8, 128))
LENGTHS = (1, 700, 1024, 2049, 333, 64)
KEYS = (32, 64, 128)
SPLITS = (512, 1024, 2048)
DECODE_TILES = (
    exact.DECODE_TILE,
    exact.SHORT_PREFILL_TILE,
    RowTile(16, 4, 3),
    RowTile(16, 4, 2),
    RowTile(16, 1, 3),
)
PREFILL_TILES = (
    exact.PREFILL_TILE,
    RowTile(128, 8, 2),
    RowTile(128, 4, 2),
    RowTile(64, 4, 2),
    RowTile(64, 4, 3),
)
NUM_PROCESSES = 14

failures = 0


def judge(name: str, good: bool, detail: str = "") -> None:
    global failures
    failures += not good
    print(f"{'ok  ' if good else 'FAIL'} {name:44} {detail}", flush=True)


# --- compiling: in many processes at once, the disk cache serves the rest ----------


def compile_tile(tile: Tile) -> None:
    x, weight = normal(8, 512, dtype=BF16, seed=0), normal(272, 512, dtype=BF16, seed=1)
    for dtype in (BF16, torch.float32):
        for splits, parallel in ((1, False), (2, False), (2, True)):
            attempt(matmul, x, weight, tile=tile, splits=splits, parallel=parallel, dtype=dtype)


def compile_attention(variant: tuple[tuple[int, int, int], RowTile, int, bool]) -> None:
    heads, tile, keys, is_packed = variant
    if is_packed:
        attempt(packed, *qkv(64, heads), (64,), tile=tile, keys_per_tile=keys)
        return
    decode = Decode(2, 640, heads)
    for programs in (1, 2):
        attempt(decode, num_programs=programs, keys_per_split=512, tile=tile, keys_per_tile=keys)


def attempt(call, *args, **options):
    """The call's result, or None where a tile does not fit the device."""
    from triton.runtime.errors import OutOfResources

    try:
        return call(*args, **options)
    except OutOfResources:
        return None


def compile_all() -> None:
    variants = [
        (heads, tile, keys, is_packed)
        for heads, keys in itertools.product(HEADS, KEYS)
        for tiles, is_packed in ((DECODE_TILES, False), (PREFILL_TILES, True))
        for tile in tiles
    ]
    variants += [(heads, exact.PREFILL_TILE, exact.KEYS_PER_TILE, False) for heads in HEADS]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=spawn) as pool:
        jobs = [pool.submit(compile_attention, variant) for variant in variants]
        jobs += [pool.submit(compile_tile, tile) for tile in TILES]
        for job in jobs:
            job.result()


# --- matrix products ----------------------------------------------------------------


def check_products() -> set[Tile]:
    """Bits of the defaults at every number of rows; the tiles whose bits are equal."""
    equal = set(TILES)
    for name, (num_outputs, num_inputs) in PROJECTIONS.items():
        most = 8192 if num_outputs < 100_000 else 2048
        x = normal(most, num_inputs, dtype=BF16, seed=0)
        weight = normal(num_outputs, num_inputs, dtype=BF16, seed=1) * num_inputs**-0.5
        dtype = torch.float32 if most == 8192 else BF16
        expected = matmul(x, weight, dtype=dtype)
        counts = [n for n in ROWS if n <= most]
        unequal = [
            n for n in counts if not torch.equal(matmul(x[:n], weight, dtype=dtype), expected[:n])
        ]
        rows, columns = slice(100, 132), slice(0, 4096)
        gap = error(expected[rows, columns], x[rows].double() @ weight[columns].double().T)
        judge(f"bits of {name}, rows {counts}", not unequal, f"unequal {unequal}" * bool(unequal))
        judge(f"error of {name}", gap < (1e-4 if dtype == torch.float32 else 5e-3), f"{gap:.1e}")
        if most < 8192:
            continue
        for tile, parallel in itertools.product(TILES, (False, True)):
            options = {"dtype": dtype, "tile": tile, "parallel": parallel}
            few = attempt(matmul, x[:200], weight, **options)
            if few is not None and not torch.equal(few, expected[:200]):
                equal.discard(tile)
    for tile in TILES:
        print(f"     {'equal bits' if tile in equal else 'bits differ'}: {tile}")
    check_linear_gradient()
    return equal


def check_linear_gradient() -> None:
    ours = [
        normal(*s, dtype=BF16, seed=i).requires_grad_()
        for i, s in enumerate(((64, 512), (256, 512), (256,)))
    ]
    theirs = [x.detach().double().requires_grad_() for x in ours]
    cotangent = normal(64, 256, dtype=BF16, seed=9)
    actual = torch.autograd.grad(linear(*ours), ours, cotangent)
    expected = torch.autograd.grad(F.linear(*theirs), theirs, cotangent.double())
    gaps = [error(a, e) for a, e in zip(actual, expected, strict=True)]
    judge("gradient of linear", max(gaps) < 1e-2, " ".join(f"{gap:.1e}" for gap in gaps))


def time_products(equal: set[Tile]) -> list[str]:
    lines = ["product        rows  cuBLAS us  default us  ratio  of floor  best of 1, 2, 4 splits"]
    for name, (num_outputs, num_inputs) in PROJECTIONS.items():
        nbytes = 2 * num_outputs * num_inputs
        # Distinct weights, more than the L2 holds, as in a model.
        copies = max(2, min(40, -(-300_000_000 // nbytes)))
        weights = [normal(num_outputs, num_inputs, dtype=BF16, seed=i) for i in range(copies)]
        is_head = num_outputs > 100_000
        for num_rows in (1, 32, 256, 1024) if is_head else (1, 32, 256, 8192):
            x = normal(num_rows, num_inputs, dtype=BF16, seed=0)
            cublas = seconds([partial(F.linear, x, weight) for weight in weights])
            default = seconds([partial(matmul, x, weight) for weight in weights])
            best = {}
            for (splits, parallel), tile in itertools.product(
                SCHEDULES[: 1 if is_head else 5], TILES
            ):
                if tile not in equal or (num_rows > 1000 and (parallel or tile.columns < 64)):
                    continue
                call = partial(matmul, x, tile=tile, splits=splits, parallel=parallel)
                if attempt(call, weights[0]) is not None:
                    time = seconds([partial(call, weight) for weight in weights])
                    found = (time, parallel, tuple(tile))
                    best[splits] = min(best.get(splits, found), found)
            floor = max(nbytes / BANDWIDTH, nbytes * num_rows / MATRIX_RATE)
            # The number of splits is part of the result: one choice must serve all rows.
            shown = "; ".join(
                f"{splits}: {time * 1e6:.1f}{' parallel' if parallel else ''} {tile}"
                for splits, (time, parallel, tile) in best.items()
            )
            lines.append(
                f"{name:13} {num_rows:5} {cublas * 1e6:10.1f} {default * 1e6:11.1f} "
                f"{default / cublas:6.2f} {floor / default:9.2f}  {shown}"
            )
    return lines


def seconds(calls, replays: int = 7) -> float:
    """Median device time of a call; a graph of all calls leaves launches out."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return sorted(times)[replays // 2]


# --- attention ----------------------------------------------------------------------


def qkv(num_tokens: int, heads: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Slices of one projection, as in a model."""
    num_heads, num_kv_heads, head_dim = heads
    merged = normal(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=BF16, seed=3)
    return merged.split([num_heads, num_kv_heads, num_kv_heads], 1)


def packed(q, k, v, lengths, **options) -> Tensor:
    context, scale = packed_context(lengths), q.shape[2] ** -0.5
    return exact._attend_packed(q, k, v, context, scale=scale, window=None, **options)[0]


@cache
def packed_context(lengths: tuple[int, ...]) -> PackedContext:
    """Made once: a captured graph may not copy from the host."""
    return PackedContext.from_lengths(lengths, device=DEVICE)


def paged_context(k, v, pieces, block_size=16) -> tuple[Tensor, PagedContext]:
    """A cache and context for queries start .. stop - 1 of sequences that begin at row `first`."""
    counts = [-(-stop // block_size) for _, _, stop in pieces]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))
    tables = torch.zeros(len(pieces), max(counts), dtype=torch.int32)
    shape = (2, sum(counts), block_size, *k.shape[1:])
    kv_cache = normal(*shape, dtype=BF16, seed=5)
    flat = kv_cache.flatten(1, 2)
    for row, ((first, _, stop), blocks) in enumerate(zip(pieces, order.split(counts), strict=True)):
        tables[row, : len(blocks)] = blocks
        slots = (
            (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[:stop].to(DEVICE)
        )
        flat[0, slots], flat[1, slots] = k[first : first + stop], v[first : first + stop]
    lengths = tuple(stop - start for _, start, stop in pieces)
    stops = tuple(stop for *_, stop in pieces)
    is_decode = set(lengths) == {1}
    borders = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    return kv_cache, PagedContext(
        kv_caches=[kv_cache],
        block_tables=tables.to(DEVICE),
        slot_mapping=torch.zeros(sum(lengths), dtype=torch.int64, device=DEVICE),
        cu_seqlens_q=borders,
        context_lens=torch.tensor(stops, dtype=torch.int32, device=DEVICE),
        max_seqlen_q=max(lengths),
        max_context_len=max(stops),
        query_lens=() if is_decode else lengths,
        key_lens=() if is_decode else stops,
    )


def num_unequal(q, k, v, expected, pieces, **options) -> int:
    """Queries whose bits are not those of the packed row."""
    kv_cache, context = paged_context(k, v, pieces)
    rows = torch.cat([torch.arange(f + a, f + b) for f, a, b in pieces]).to(DEVICE)
    scale = q.shape[2] ** -0.5
    output = attempt(
        exact.paged_attention, q[rows], kv_cache, context, scale=scale, window=None, **options
    )
    return 0 if output is None else int((output != expected[rows]).flatten(1).any(1).sum())


def check_attention(heads) -> None:
    name = f"attention {heads}"
    q, k, v = qkv(sum(LENGTHS), heads)
    firsts = [0, *itertools.accumulate(LENGTHS)][:-1]
    expected = packed(q, k, v, LENGTHS)
    every = list(zip(firsts, LENGTHS, strict=True))
    alone = all(
        torch.equal(packed(q[f : f + n], k[f : f + n], v[f : f + n], (n,)), expected[f : f + n])
        for f, n in every
    )
    judge(f"{name}: packed alone", alone)
    cases = {
        "prefill": [(f, 0, n) for f, n in every],
        "decode": [(f, n - 1, n) for f, n in every],
        "decode of one": [(firsts[3], 2047, 2048)],
        "decode before a split ends": [(firsts[3], 1023, 1024), (firsts[3], 1024, 1025)],
        "4 queries": [(f, n - 4, n) for f, n in every if n >= 4],
        "decode of 512": [(firsts[3], n - 1, n) for n in range(1500, 2012)],
    }
    for size in (64, 100, 512):
        cases |= {
            f"chunks of {size} at {start}": [
                (f, start, min(start + size, n)) for f, n in every if n > start
            ]
            for start in range(0, 2049, 4 * size)
        }
    for case, pieces in cases.items():
        unequal = num_unequal(q, k, v, expected, pieces)
        judge(f"{name}: {case}", not unequal, f"{unequal} unequal" * bool(unequal))
    for programs in (1, 2, 4):
        unequal = num_unequal(q, k, v, expected, cases["decode"], num_programs=programs)
        judge(f"{name}: decode by {programs} programs", not unequal)
    for keys in KEYS:
        for tile in PREFILL_TILES:
            other = attempt(packed, q, k, v, LENGTHS, tile=tile, keys_per_tile=keys)
            base = packed(q, k, v, LENGTHS, keys_per_tile=keys)
            same = other is None or torch.equal(other, base)
            print(f"     {'equal bits' if same else 'bits differ'}: packed, {keys} keys, {tile}")
        for tile in DECODE_TILES:
            base = packed(q, k, v, LENGTHS, keys_per_tile=keys)
            unequal = num_unequal(q, k, v, base, cases["decode"], tile=tile, keys_per_tile=keys)
            print(f"     {'bits differ' if unequal else 'equal bits'}: decode, {keys} keys, {tile}")
    planted = num_unequal(q, k, v, expected, cases["decode"], keys_per_split=512)
    judge(f"{name}: planted splits of 512 are seen", planted > 0, f"{planted} unequal")
    check_attention_errors(name, (q, k, v), expected)


def check_attention_errors(name: str, inputs, expected: Tensor) -> None:
    scale = expected.shape[2] ** -0.5
    ours = [x.detach().clone().requires_grad_() for x in inputs]
    theirs = [x.detach().double().requires_grad_() for x in inputs]
    pieces = zip(*(x.split(LENGTHS) for x in theirs), strict=True)
    twin = torch.cat([attend(*piece, scale=scale) for piece in pieces])
    gap = token_error(expected, twin.detach())
    judge(f"{name}: error", gap < 2e-2, f"{gap:.1e}")
    cotangent = normal(*expected.shape, dtype=BF16, seed=8)
    context = packed_context(LENGTHS)
    output = exact.packed_attention(*ours, context, scale=scale, window=None)
    actual = torch.autograd.grad(output, ours, cotangent)
    wanted = torch.autograd.grad(twin, theirs, cotangent.double())
    gaps = [error(a, e) for a, e in zip(actual, wanted, strict=True)]
    judge(f"{name}: gradient", max(gaps) < 2e-2, " ".join(f"{gap:.1e}" for gap in gaps))


class Decode:
    """A decode step over a cache of random numbers."""

    def __init__(self, batch: int, length: int, heads, block_size: int = 16) -> None:
        num_heads, num_kv_heads, head_dim = heads
        per_row = -(-length // block_size)
        order = torch.randperm(batch * per_row, generator=torch.Generator().manual_seed(0))
        self.q = normal(batch, num_heads, head_dim, dtype=BF16, seed=1)
        shape = (2, batch * per_row, block_size, num_kv_heads, head_dim)
        self.kv_cache = normal(*shape, dtype=BF16, seed=2)
        self.length, self.nbytes = length, self.kv_cache.nbytes
        self.context = PagedContext(
            kv_caches=[self.kv_cache],
            block_tables=order.view(batch, per_row).int().to(DEVICE),
            slot_mapping=torch.zeros(batch, dtype=torch.int64, device=DEVICE),
            cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=DEVICE),
            context_lens=torch.full((batch,), length, dtype=torch.int32, device=DEVICE),
            max_seqlen_q=1,
            max_context_len=length,
        )
        self.scale = head_dim**-0.5

    def __call__(self, **options) -> Tensor:
        return exact.paged_attention(
            self.q, self.kv_cache, self.context, scale=self.scale, window=None, **options
        )

    def ordinary(self) -> Tensor:
        tables, lengths = self.context.block_tables, self.context.context_lens
        return triton_decode.decode_attention(
            self.q, self.kv_cache, tables, lengths, self.length, scale=self.scale
        )


def time_decode() -> list[str]:
    lines = ["decode   batch context  ordinary us  default us  TB/s  best: us, keys, split, tile"]
    for heads in HEADS:
        for batch, length in ((256, 1024), (32, 1024), (16, 8192), (1, 8192)):
            steps = [Decode(batch, length, heads) for _ in range(2 if batch == 256 else 6)]
            ordinary = seconds([step.ordinary for step in steps])
            default = seconds(list(steps))
            found = {}
            for keys, split, tile in itertools.product(KEYS, SPLITS, DECODE_TILES):
                options = {"keys_per_tile": keys, "keys_per_split": split, "tile": tile}
                if attempt(steps[0], **options) is not None:
                    calls = [partial(step, **options) for step in steps]
                    found[keys, split, tuple(tile)] = seconds(calls)
            rate = steps[0].nbytes / default / 1e12
            lines.append(
                f"{heads[0]:3}/{heads[1]} {batch:8} {length:7} {ordinary * 1e6:12.1f} "
                f"{default * 1e6:11.1f} {rate:5.2f}  {best_of(found)}"
            )
    return lines


def time_packed() -> list[str]:
    lines = ["packed  sequences    flash us  default us  TFLOP/s  best: us, keys, tile"]
    for heads in HEADS:
        for count, length in ((16, 1024), (2, 8192)):
            inputs, lengths = qkv(count * length, heads), (length,) * count
            context = packed_context(lengths)
            flashed = seconds(
                [
                    partial(
                        flash.packed_attention,
                        *inputs,
                        context,
                        scale=heads[2] ** -0.5,
                        window=None,
                    )
                ]
                * 4
            )
            default = seconds([partial(packed, *inputs, lengths)] * 4)
            found = {}
            for keys, tile in itertools.product(KEYS, PREFILL_TILES):
                call = partial(packed, *inputs, lengths, keys_per_tile=keys, tile=tile)
                if attempt(call) is not None:
                    found[keys, tuple(tile)] = seconds([call] * 4)
            rate = 2 * count * length**2 * heads[0] * heads[2] / default / 1e12
            lines.append(
                f"{heads[0]:3}/{heads[1]} {count:3} x {length:5} {flashed * 1e6:10.0f} "
                f"{default * 1e6:11.0f} {rate:8.0f}  {best_of(found)}"
            )
    return lines


def best_of(found: dict) -> str:
    ranked = sorted(found.items(), key=lambda item: item[1])
    return "; ".join(f"{time * 1e6:.1f} {key}" for key, time in ranked[:4])


def main() -> int:
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    began = perf_counter()

    def clock(phase: str) -> None:
        print(f"--- {phase} after {perf_counter() - began:.0f} s", flush=True)

    compile_all()
    clock("compiled")
    equal = check_products()
    for heads in HEADS:
        check_attention(heads)
    clock("checked")
    tables = [time_decode(), time_packed()]
    clock("attention timed")
    tables.append(time_products(equal))
    clock("products timed")
    for table in tables:
        print("\n".join(table), end="\n\n")
    print("all good" if not failures else f"{failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
