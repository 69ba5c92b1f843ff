"""Checks paged decode against float64 and finds its fastest constants.

`python -m benchmarks.gpu.decode_sweep` first runs all cases of `tests/attention/cases.py` and
larger ones on the GPU and prints those beyond their limit, then times decode in CUDA graphs over
caches that are larger than the L2, for every sensible `DecodeTuning`, and prints for each shape the
fastest ones beside the one that `choose_tuning` takes. All numbers go to `$OUT/decode_sweep.json`.
Exits with 1 where a check fails.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch
from tests.attention.cases import DECODE_CASES, FP8_CASES
from tests.attention.twin import Pages
from triton.runtime.errors import OutOfResources

from hone.attention import SharedPrefix
from hone.attention.triton_decode import DecodeTuning, choose_tuning, decode_attention
from hone.attention.triton_write import write_kv

DEVICE = torch.device("cuda")
KV_HEADS, HEAD_DIM = 8, 128
TIME_LIMIT_S = 215
LIMITS = {"bfloat16": 2e-2, "float32": 1e-5, "fp8": 2e-2}
STARTED = time.monotonic()


@dataclass(frozen=True)
class Workload:
    """One decode step: what is in the batch, and how it is stored."""

    name: str
    lens: tuple[int, ...]
    heads_per_key: int = 2
    page: int = 16
    fp8: bool = False
    group_size: int = 0  # consecutive sequences that share their first keys
    shared_keys: int = 0
    members: int = 0  # M of SharedPrefix; 0: the shared blocks are read by each sequence
    longest: int = 0  # the max_context_len of the graph, where not the longest length
    groups: int = 0

    @property
    def traffic(self) -> int:
        """Bytes of keys and values that must be read once."""
        keys = sum(self.lens)
        if self.group_size:
            keys -= self.shared_keys * (len(self.lens) - len(self.lens) // self.group_size)
        return keys * 2 * KV_HEADS * HEAD_DIM * (1 if self.fp8 else 2)


def uniform(batch: int, context: int, **options) -> Workload:
    return Workload(f"B={batch} ctx={context}", (context,) * batch, **options)


def log_normal(batch: int, **options) -> Workload:
    draw = random.Random(0)
    lens = tuple(256 + min(3800, int(800 * 2.718 ** draw.gauss(0, 0.7))) for _ in range(batch))
    return Workload(f"B={batch} log-normal", lens, **options)


class Step:
    """Tensors of a workload for several layers."""

    def __init__(self, work: Workload, layers: int) -> None:
        self.work, batch = work, len(work.lens)
        needed = [-(-n // work.page) for n in work.lens]
        total = sum(needed)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(0)).int()
        tables = torch.zeros(batch, max(needed), dtype=torch.int32)
        for i, blocks in enumerate(order.split(needed)):
            tables[i, : len(blocks)] = blocks
        self.shared = None
        if work.group_size:
            count = work.shared_keys // work.page
            for first in range(0, batch, work.group_size):
                tables[first : first + work.group_size, :count] = tables[first, :count]
        if work.members:
            self.shared = shared_prefix(work)
        self.tables = tables.to(DEVICE)
        self.lens = torch.tensor(work.lens, dtype=torch.int32, device=DEVICE)
        shape = (layers, 2, total, work.page, KV_HEADS, HEAD_DIM)
        if work.fp8:
            cache = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)
            self.caches = cache.bitwise_and_(0xF7).view(torch.float8_e4m3fn)  # no NaN
        else:
            self.caches = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_()
        self.scales = torch.rand(2, KV_HEADS, device=DEVICE) * 0.01 if work.fp8 else None
        heads = KV_HEADS * work.heads_per_key
        self.q = torch.randn(batch, heads, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)

    def attend(self, layer: int = 0, tuning: DecodeTuning | None = None):
        return decode_attention(
            self.q,
            self.caches[layer],
            self.tables,
            self.lens,
            self.work.longest or max(self.work.lens),
            scales=self.scales,
            shared=self.shared,
            scale=HEAD_DIM**-0.5,
            tuning=tuning,
        )

    def error(self, tuning: DecodeTuning | None = None) -> float:
        """Largest error of a token over its largest value, against float64."""
        work, worst = self.work, 0.0
        actual = self.attend(0, tuning).double()
        q = self.q.double()
        for i, length in enumerate(work.lens):
            blocks = self.tables[i, : -(-length // work.page)].long()
            kv = self.caches[0].view(torch.uint8 if work.fp8 else torch.bfloat16)[:, blocks]
            kv = kv.view(self.caches.dtype).double().flatten(1, 2)[:, :length]
            if self.scales is not None:
                kv *= self.scales.double()[:, None, :, None]
            k, v = (x.transpose(0, 1).repeat_interleave(work.heads_per_key, 0) for x in kv)
            scores = q[i].unsqueeze(1) @ k.transpose(1, 2) * HEAD_DIM**-0.5
            expected = (scores.softmax(-1) @ v).squeeze(1)
            difference = (actual[i] - expected).abs().max()
            worst = max(worst, (difference / expected.abs().max()).item())
        return worst

    def seconds(self, tuning: DecodeTuning | None, replays: int = 5) -> float:
        """Of one call, in a graph over all layers."""
        layers = self.caches.shape[0]
        self.attend(0, tuning)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in range(layers):
                self.attend(layer, tuning)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        graph.replay()
        for event in events[:-1]:
            event.record()
            graph.replay()
        events[-1].record()
        torch.cuda.synchronize()
        times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
        return times[replays // 2] / 1e3 / layers


def shared_prefix(work: Workload) -> SharedPrefix:
    batch, per_entry = len(work.lens), min(work.members, work.group_size)
    assert work.group_size % per_entry == 0
    count = batch // per_entry
    rows = torch.full((work.groups or count, work.members), -1, dtype=torch.int32)
    rows[:count, :per_entry] = torch.arange(batch).view(count, per_entry)
    lens = torch.zeros(rows.shape[0], dtype=torch.int32)
    lens[:count] = work.shared_keys
    starts = torch.full((batch,), work.shared_keys, dtype=torch.int32)
    return SharedPrefix(rows=rows.to(DEVICE), lens=lens.to(DEVICE), starts=starts.to(DEVICE))


def case_error(name: str, dtype: str) -> float:
    """A case of the tests on the CPU, with the kernel's own tuning or as few splits as it says."""
    case = dict(DECODE_CASES[name])
    keys, heads = case.pop("keys"), case.pop("heads")
    groups, members = case.pop("groups", ()), case.pop("members", 0)
    splits, tile, longest = (
        case.pop("splits", None),
        case.pop("tile", 16),
        case.pop("longest", None),
    )
    fp8 = dtype == "fp8"
    pages = Pages(
        [1] * len(keys),
        keys,
        groups=groups,
        dtype=getattr(torch, "bfloat16" if fp8 else dtype),
        fp8=fp8,
        device="cuda",
        **heads,
    )
    context = pages.decode_context(num_groups=2 * len(groups), members=members)
    write_kv(pages.k, pages.v, pages.kv_cache, context.slot_mapping, pages.scales)
    tuning = None
    if splits is not None:  # no fewer than one a processor; tiles are small enough to have several
        tuning = DecodeTuning(tile, 2, 3, 1)
    worst = 0.0
    expected = pages.expected(scale=0.3, **case)
    for _ in range(20):  # a race would not show each time
        actual = decode_attention(
            pages.q,
            pages.kv_cache,
            context.block_tables,
            context.context_lens,
            longest or context.max_context_len,
            scales=pages.scales,
            shared=context.shared,
            scale=0.3,
            tuning=tuning,
            **case,
        )
        error = (actual.double() - expected).abs().max() / expected.abs().max()
        worst = max(worst, error.item() if actual.isfinite().all() else float("inf"))
    return worst


def smaller(work: Workload) -> Workload:
    """The same kernel on less, to have it compiled."""
    count = work.group_size or 2
    return replace(work, lens=(work.shared_keys + 64,) * count, longest=0, groups=0)


def compiled(task: tuple[Workload, DecodeTuning]) -> str:
    """Empty, or why this one cannot be."""
    work, tuning = task
    try:
        Step(smaller(work), 1).attend(0, tuning)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  # printed; the sweep goes on
        return f"{work.name} {tuning}: {type(error).__name__} {str(error)[:200]}"
    return ""


def tunings(work: Workload) -> list[DecodeTuning]:
    """The plausible ones: more warps and other tiles have been slower throughout."""
    fp8 = work.fp8
    choices = (64, 128) if fp8 else (32, 64), (2, 4), (2, 3), (2, 3, 4, 6, 8)
    plain = itertools.starmap(DecodeTuning, itertools.product(*choices))
    if not fp8:
        return list(plain)
    few = [(128, 8), (128, 7), (144, 7), (168, 6), (200, 5)]
    return [*plain, *(DecodeTuning(64, 2, 3, n, registers) for registers, n in few)]


def kernels(work: Workload) -> list[DecodeTuning]:
    """One tuning for each kernel that has to be compiled."""
    return list({replace(t, programs_per_processor=1) for t in tunings(work)})


GROUPS = {"lens": (856,) * 512, "shared_keys": 256}
WORKLOADS = [
    uniform(256, 1024),
    uniform(32, 1024),
    Workload("64x8, in eights", group_size=8, members=8, **GROUPS),
    Workload("64x8, apart", group_size=8, **GROUPS),
    Workload("64x8, in eights", heads_per_key=4, group_size=8, members=8, **GROUPS),
    Workload("64x8, in fours", heads_per_key=4, group_size=8, members=4, **GROUPS),
    Workload("64x8, apart", heads_per_key=4, group_size=8, **GROUPS),
    Workload("32x16, in sixteens", group_size=16, members=16, **GROUPS),
    Workload("32x16, in eights", group_size=16, members=8, **GROUPS),
    Workload("32x16, apart", group_size=16, **GROUPS),
    Workload("4x8, in eights", (1424,) * 32, group_size=8, members=8, shared_keys=1024),
    Workload("4x8, apart", (1424,) * 32, group_size=8, shared_keys=1024),
    Workload("16x8, in eights", (856,) * 128, group_size=8, members=8, shared_keys=256),
    Workload("16x8, apart", (856,) * 128, group_size=8, shared_keys=256),
    Workload("4x8, in eights, 4 heads", (1424,) * 32, 4, group_size=8, members=8, shared_keys=1024),
    Workload("4x8, apart, 4 heads", (1424,) * 32, 4, group_size=8, shared_keys=1024),
    Workload("64x8, in eights", fp8=True, group_size=8, members=8, **GROUPS),
    Workload("64x8, apart", fp8=True, group_size=8, **GROUPS),
    uniform(256, 2048, fp8=True),
    uniform(256, 1024, fp8=True, page=32),
    uniform(256, 8192),
    uniform(32, 2048, fp8=True),
    uniform(256, 2048, fp8=True, heads_per_key=4),
    uniform(256, 1024, fp8=True),
    log_normal(256),
    uniform(1, 1024),
    uniform(8, 1024),
    uniform(1, 8192),
    uniform(8, 256, longest=32768),
    uniform(32, 256),
    uniform(64, 1024),
    uniform(256, 1024, heads_per_key=4),
    uniform(32, 1024, heads_per_key=4),
    uniform(256, 1024, page=32),
    uniform(256, 1024, page=64),
    uniform(1024, 256),
    uniform(8, 8192),
]


def describe(work: Workload) -> str:
    flags = [f"heads {work.heads_per_key}", f"page {work.page}"]
    flags += ["fp8"] if work.fp8 else []
    flags += [f"longest {work.longest}"] if work.longest else []
    return f"{work.name}, {', '.join(flags)}"


def short(tuning: DecodeTuning) -> str:
    return "/".join(str(value) for value in asdict(tuning).values())


def main() -> int:
    failures, results = 0, []
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    checks = [(c, d) for c in DECODE_CASES for d in ("bfloat16", "float32")]
    checks += [(c, "fp8") for c in FP8_CASES]
    kinds = {}
    for work in WORKLOADS:
        for tuning in kernels(work):
            key = (work.heads_per_key, work.page, work.fp8, work.members, tuning)
            kinds[key] = (work, tuning)
    with ProcessPoolExecutor(15, mp_context=get_context("spawn")) as pool:
        errors = [pool.submit(case_error, *check) for check in checks]
        builds = [pool.submit(compiled, task) for task in kinds.values()]
        for (name, dtype), future in zip(checks, errors, strict=True):
            value = future.result()
            if not value < LIMITS[dtype]:
                failures += 1
                print(f"FAIL {name}, {dtype}: {value:.1e}")
        broken = [text for text in (future.result() for future in builds) if text]
        print(*broken, sep="\n")
    print(f"{len(checks)} cases, {failures} failed; {len(kinds)} kernels", elapsed())
    for work in WORKLOADS:
        if sum(work.lens) < 1_000_000:
            value = Step(work, 1).error()
            failures += not value < LIMITS["bfloat16"]
            if not value < LIMITS["bfloat16"]:
                print(f"FAIL {describe(work)}: {value:.1e}")
    print("checks done", elapsed())
    source = torch.empty(2**32, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    target.copy_(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    print(f"copy {2 * 2**32 / start.elapsed_time(end) / 1e9:.2f} TB/s")
    del source, target
    launch_cost()
    print("tile/warps/stages/programs/registers: us, TB/s of keys and values read once")
    for work in WORKLOADS:
        if time.monotonic() - STARTED > TIME_LIMIT_S:
            print("out of time")
            break
        torch.cuda.empty_cache()
        step = Step(work, max(3, min(128, 400_000_000 // work.traffic)))
        choices = tunings(work)
        if time.monotonic() - STARTED > TIME_LIMIT_S - 40:
            choices = [t for t in choices if t.num_stages == 3]
        times = []
        for tuning in choices:
            try:
                times.append((step.seconds(tuning), tuning))
            except OutOfResources:  # said before
                continue
        times.sort(key=lambda pair: pair[0])
        results += [
            {"workload": describe(work), "tuning": short(t), "seconds": s, "traffic": work.traffic}
            for s, t in times
        ]
        rows = work.heads_per_key * max(1, work.members)
        default = choose_tuning(rows, HEAD_DIM, is_fp8=work.fp8)
        best = [*times[:4], (step.seconds(default), default)]
        texts = [f"{short(t)}: {s * 1e6:.1f}, {work.traffic / s / 1e12:.2f}" for s, t in best]
        print(f"{describe(work):48} {' | '.join(texts[:-1])} || now {texts[-1]}")
    Path(os.environ.get("OUT", "."), "decode_sweep.json").write_text(json.dumps(results))
    print("all within limits" if not failures else f"{failures} above their limit", elapsed())
    return 1 if failures else 0


def launch_cost() -> None:
    step = Step(uniform(8, 64), 1)
    step.attend()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(200):
        step.attend()
    taken = time.perf_counter() - start
    torch.cuda.synchronize()
    print(f"launch from Python {taken / 200 * 1e6:.0f} us")


def elapsed() -> str:
    return f"[{time.monotonic() - STARTED:.0f} s]"


if __name__ == "__main__":
    sys.exit(main())
