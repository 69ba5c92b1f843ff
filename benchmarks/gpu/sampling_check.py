"""Checks fused sampling on CUDA against float64 and the torch yardstick, and times it.

`python -m benchmarks.gpu.sampling_check` prints one line a check, the times of other block and tile
sizes, and last the time of a step's sampling. Exits with 1 where a check fails.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np
import torch
from tests.engine import reference
from tests.engine.sampling_cases import (
    GRID,
    draw_errors,
    kept_differences,
    make_params,
    make_table,
    sample_rows,
)
from torch import Tensor

from hone.engine import sampling_kernels as kernels
from hone.engine.sampler import sample
from hone.engine.sampling_table import SamplingTable
from hone.models import token_logprobs
from hone.types import SamplingParams

DEVICE = torch.device("cuda")
VOCAB_SIZE = 151_936
BATCHES = (1, 32, 64, 256, 512, 1024)
VARIANTS = {
    "plain": {"temperature": 0.8},
    "top-p": {"top_p": 0.95},
    "top-k": {"top_k": 50},
    "all": {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "min_p": 0.01},
}
LEVEL_TOLERANCE = 2e-6
LOGPROB_TOLERANCE = 4e-6
BANDWIDTH = 4.29e12


def make_logits(
    num_rows: int, vocab_size: int, dtype: torch.dtype, *, seed: int, flat: bool = False
) -> Tensor:
    """A wide bulk and, but in flat ones, some thirty tokens that stand out, as models give them."""
    draw = torch.Generator(DEVICE).manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=draw, device=DEVICE)
    if flat:
        return logits.to(dtype)
    logits *= 2.5
    chosen = torch.randint(vocab_size, (num_rows, 30), generator=draw, device=DEVICE)
    extra = torch.rand(num_rows, 30, generator=draw, device=DEVICE) * 12 + 8
    return logits.scatter_(1, chosen, extra).to(dtype)


def same_bits(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> bool:
    tokens = torch.equal(left[0], right[0])
    return tokens and torch.equal(left[1].view(torch.int32), right[1].view(torch.int32))


def check_draws(dtype: torch.dtype, vocab_size: int, *, filtered: bool, flat: bool) -> str | None:
    logits = make_logits(44, vocab_size, dtype, seed=vocab_size, flat=flat)
    params = make_params(len(logits), seed=1)
    positions = torch.arange(len(logits), device=DEVICE) * 3
    drawn = sample_rows(logits, params, positions, filtered=filtered)
    levels, logprobs = draw_errors(logits, params, positions, *drawn, filtered=filtered)
    good = levels.max() < LEVEL_TOLERANCE and logprobs.max() < LOGPROB_TOLERANCE
    text = f"level error {levels.max():.1e}, log-prob error {logprobs.max():.1e}"
    return None if good else f"{text} in rows {np.flatnonzero(levels > LEVEL_TOLERANCE)[:8]}"


def check_kept(dtype: torch.dtype, *, flat: bool) -> str | None:
    logits = make_logits(256, VOCAB_SIZE, dtype, seed=2, flat=flat)
    # The yardstick adds 151,936 float32 numbers in a row.
    count = kept_differences(logits, make_params(256, seed=3), tolerance=5e-5)
    return f"{count} tokens kept by one only" if count else None


def check_counts(settings: dict[str, float], num_draws: int = 20_000) -> str | None:
    logits = make_logits(1, 12, torch.float32, seed=4, flat=True) * 1.5
    params = SamplingParams(max_tokens=1, seed=5, **settings)
    table = make_table([params], 12, DEVICE)
    slots = torch.zeros(num_draws, dtype=torch.int64, device=DEVICE)
    batch = table.rows(slots, filtered=table.is_filtered(np.zeros(1, np.int64)))
    positions = torch.arange(num_draws, device=DEVICE)
    tokens, _ = sample(logits.expand(num_draws, -1).contiguous(), batch, positions)
    counts = np.bincount(tokens.cpu().numpy(), minlength=12)
    expected = reference.distribution(logits[0].double().cpu().numpy(), params) * num_draws
    if counts[expected == 0].sum():
        return "drew tokens of probability 0"
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic, freedom = ((counts - expected) ** 2 / expected).sum(), max(len(counts) - 1, 1)
    bound = freedom + 5 * math.sqrt(2 * freedom)
    return None if statistic <= bound else f"chi-square {statistic:.1f}, at most {bound:.1f}"


def check_independence(dtype: torch.dtype) -> str | None:
    """Each row alone, in reverse, and without filters in a batch without; and scored again."""
    logits = make_logits(256, VOCAB_SIZE, dtype, seed=6)
    params, positions = make_params(256, seed=7), torch.arange(256, device=DEVICE)
    drawn = sample_rows(logits, params, positions)
    backwards = sample_rows(logits.flip(0), params[::-1], positions.flip(0))
    if not same_bits(drawn, (backwards[0].flip(0), backwards[1].flip(0))):
        return "the reversed batch differs"
    plain = sample_rows(logits, params, positions, filtered=False)
    for i, one in [*enumerate(params[:22]), *enumerate(params[-11:], start=245)]:
        rows = slice(i, i + 1)
        alone = sample_rows(logits[rows].clone(), [one], positions[rows])
        if not same_bits(alone, (drawn[0][rows], drawn[1][rows])):
            return f"row {i} alone differs"
        has_filter = one.temperature and (one.top_k or one.top_p < 1 or one.min_p)
        if not has_filter and not same_bits(alone, (plain[0][rows], plain[1][rows])):
            return f"row {i} in a batch without filters differs"
    temperatures = torch.tensor([one.temperature or 1.0 for one in params], device=DEVICE)
    for rows in (slice(256), slice(37), slice(200, 201), slice(3, 256, 5)):
        scored = token_logprobs.token_logprobs(logits[rows], plain[0][rows], temperatures[rows])
        if not torch.equal(scored, plain[1][rows]):
            return f"token_logprobs differs in {rows}"
    return None


def check_no_numbers() -> str | None:
    logits = make_logits(8, VOCAB_SIZE, torch.bfloat16, seed=8)
    logits[0, 7], logits[1], logits[2, -1], logits[3] = math.nan, math.nan, math.inf, -math.inf
    for filtered in (False, True):
        params = make_params(8, seed=9, names=("all", "plain") if filtered else ("plain", "greedy"))
        positions = torch.arange(8, device=DEVICE)
        tokens, logprobs = sample_rows(logits, params, positions, filtered=filtered)
        if logprobs.isnan().tolist() != [True] * 4 + [False] * 4:
            return f"{filtered=}: {logprobs.tolist()}"
        if not ((tokens >= 0) & (tokens < VOCAB_SIZE)).all():
            return f"{filtered=}: {tokens.tolist()}"
    return None


def check_graph() -> str | None:
    """A captured step, replayed with other logits, slots, positions and parameters."""
    num_rows, num_slots = 64, 90
    table = SamplingTable(num_slots, vocab_size=VOCAB_SIZE, device=DEVICE)
    logits = make_logits(num_rows, VOCAB_SIZE, torch.bfloat16, seed=10)
    slots = torch.arange(num_rows, device=DEVICE)
    positions = torch.zeros(num_rows, dtype=torch.int64, device=DEVICE)

    def step() -> tuple[Tensor, Tensor]:
        return sample(logits, table.rows(slots, filtered=True), positions)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    generator = np.random.default_rng(11)
    for trial in range(6):
        for slot, one in enumerate(make_params(num_slots, seed=20 + trial)):
            table.write(slot, one)
        table.flush()
        chosen = generator.permutation(num_slots)[:num_rows]
        chosen[-5:] = num_slots  # padding
        slots.copy_(torch.from_numpy(chosen))
        positions.copy_(torch.from_numpy(generator.integers(0, 4096, num_rows)))
        logits.copy_(make_logits(num_rows, VOCAB_SIZE, torch.bfloat16, seed=30 + trial))
        graph.replay()
        expected = sample(logits, table.rows(slots, filtered=True), positions)
        if not same_bits(captured, expected):
            return f"replay {trial} differs from the call outside the graph"
    return None


def seconds(calls: list[Callable[[], object]]) -> float:
    """Device time of one of the calls, which are captured in one graph; median of replays."""
    calls[0]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return sorted(times[2:])[3]


def steps(
    num_rows: int, settings: dict[str, float], dtype: torch.dtype, *, flat: bool = False
) -> dict[str, list[Callable[[], object]]]:
    """What to time: the whole, sums of blocks alone, and borders alone; over logits that do not
    fit into the L2 cache together (of few rows they do, as after the head of a small batch)."""
    size = num_rows * VOCAB_SIZE * dtype.itemsize
    pool = make_logits(num_rows, VOCAB_SIZE, dtype, seed=40, flat=flat)
    sets = [pool, *(pool.roll(i, 0).clone() for i in range(1, min(32, 400 * 2**20 // size + 1)))]
    params = [SamplingParams(max_tokens=1, seed=i, **settings) for i in range(num_rows)]
    table = make_table(params, VOCAB_SIZE, DEVICE)
    slots = torch.arange(num_rows, device=DEVICE)
    filtered = table.is_filtered(np.arange(num_rows))
    positions = torch.arange(num_rows, device=DEVICE)
    batch = table.rows(slots, filtered=filtered)

    def whole(logits: Tensor) -> object:
        return sample(logits, table.rows(slots, filtered=filtered), positions)

    def sums(logits: Tensor) -> object:
        return token_logprobs.block_sums(token_logprobs.Rows.of(logits, batch.temperatures))

    def borders(logits: Tensor) -> object:
        rows = token_logprobs.Rows.of(logits, batch.temperatures)
        return kernels._find_borders(rows, *blocks, batch)

    blocks = token_logprobs.block_sums(token_logprobs.Rows.of(pool, batch.temperatures))
    calls: dict[str, list[Callable[[], object]]] = {
        "whole": [partial(whole, logits) for logits in sets],
        "sums": [partial(sums, logits) for logits in sets],
    }
    if filtered:
        calls["borders"] = [partial(borders, pool)] * 4
    return calls


def sweep(
    names: tuple[str, ...], choices: list[tuple[int, ...]], measure: Callable[[], str]
) -> None:
    """Print `measure` with the constants `names` of the kernels set to each of the choices."""
    before = [getattr(kernels, name) for name in names]
    for choice in choices:
        for name, value in zip(names, choice, strict=True):
            setattr(kernels, name, value)
        setting = " ".join(f"{n}={v}" for n, v in zip(names, choice, strict=True))
        default = "  <- default" if list(choice) == before else ""
        print(f"  {setting:58} {measure()}{default}", flush=True)
    for name, value in zip(names, before, strict=True):
        setattr(kernels, name, value)


def run_sweeps() -> None:
    bf16 = torch.bfloat16

    def micros(num_rows: int, variant: str, part: str, *, flat: bool = False) -> float:
        return seconds(steps(num_rows, VARIANTS[variant], bf16, flat=flat)[part]) * 1e6

    print("\nplain, bfloat16, us: sums B=256, sums B=32, whole B=256, whole B=32")
    tiles = [
        (block, tile // block, warps, 4)
        for block, tile, warps in product((128, 256, 512), (4096, 8192, 16384), (4, 8))
        if not (tile == 4096 and warps == 8)
    ]
    sweep(
        ("BLOCK_TOKENS", "TILE_BLOCKS", "TILE_WARPS", "ROW_WARPS"),
        [*tiles, (256, 32, 4, 2), (256, 32, 4, 8)],
        lambda: " ".join(
            f"{micros(num_rows, 'plain', part):7.1f}"
            for part, num_rows in product(("sums", "whole"), (256, 32))
        ),
    )
    print("\nborders, bfloat16, us: top-k B=256, top-p B=256, top-p B=32, flat top-p B=256")
    sweep(
        ("SEARCH_TILE_BLOCKS", "SEARCH_WARPS", "CANDIDATES"),
        [
            *product((16, 32), (8, 16), (2048, 4096)),
            (64, 16, 4096),
            (32, 16, 8192),
            (64, 32, 8192),
        ],
        lambda: " ".join(
            f"{value:7.1f}"
            for value in (
                micros(256, "top-k", "borders"),
                micros(256, "top-p", "borders"),
                micros(32, "top-p", "borders"),
                micros(256, "top-p", "borders", flat=True),
            )
        ),
    )


def main() -> int:
    failures, began = 0, time.perf_counter()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")

    def report(name: str, trouble: str | None) -> None:
        nonlocal failures
        failures += trouble is not None
        print(f"{'ok  ' if trouble is None else 'FAIL'} {name:56} {trouble or ''}", flush=True)

    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    cases = [(bf16, VOCAB_SIZE, False), (bf16, 50_257, True), (fp32, VOCAB_SIZE, False)]
    for (dtype, size, flat), filtered in product([*cases, (fp16, 127, True)], (False, True)):
        kind = f"{dtype}, V={size}{', flat' * flat}, {'filters' if filtered else 'plain'}"
        report(f"draws, {kind}", check_draws(dtype, size, filtered=filtered, flat=flat))
    for dtype, flat in product((bf16, fp32), (False, True)):
        report(f"kept tokens, {dtype}{', flat' * flat}", check_kept(dtype, flat=flat))
    for name in sorted(GRID.keys() - {"greedy"}):
        report(f"counts, {name}", check_counts(GRID[name]))
    for dtype in (bf16, fp32):
        report(f"rows are independent, {dtype}", check_independence(dtype))
    report("logits that are no numbers", check_no_numbers())
    report("captured graph, parameters changed", check_graph())
    print(f"checks took {time.perf_counter() - began:.0f} s")
    run_sweeps()

    print(f"\nsampling of a step, V={VOCAB_SIZE}, us; in brackets the sums and borders alone")
    print(f"{'B':>6} {'one read':>9}" + "".join(f"{name:>22}" for name in VARIANTS), end="")
    print(f"{'top-p, flat':>22}{'plain, float32':>22}")
    columns = [(one, bf16, False) for one in VARIANTS.values()]
    columns += [
        (VARIANTS["top-p"], bf16, True),
        (VARIANTS["plain"], fp32, False),
    ]
    for num_rows in BATCHES:
        print(f"{num_rows:6} {num_rows * VOCAB_SIZE * 2 / BANDWIDTH * 1e6:9.1f}", end="")
        for settings, dtype, flat in columns:
            calls = steps(num_rows, settings, dtype, flat=flat)
            took = {name: f"{seconds(one) * 1e6:.1f}" for name, one in calls.items()}
            parts = ", ".join(took[name] for name in took if name != "whole")
            whole = f"{took['whole']} ({parts})"
            print(f"{whole:>22}", end="", flush=True)
        print()
    print(f"took {time.perf_counter() - began:.0f} s;", end=" ")
    print("all checks passed" if not failures else f"{failures} checks FAILED")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
