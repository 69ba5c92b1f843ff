"""Qwen3.5 on one GPU: the decode kernel of gated delta nets, and whole decode steps.

    python -m benchmarks.gpu.hybrid_decode_check [SECTION ...] [--seconds N]

Sections:

    kernel   one token of 1 to 256 sequences against float32 in plain torch, eager and recorded
    model    chunks of prompts, then decoded tokens, against float32; recorded against eager
    tune     the kernel's time by its launch parameters, as a share of the memory's bandwidth
    step     a decode step of whole models in a CUDA graph, as a share of its limit
    long     the same behind contexts of 16,384 tokens
    parts    what such a step of 64 sequences consists of, by kernel

Weights are random. A limit counts every weight, key, value, and state as read once, states also as
written once, and the products at the matrix rate where they take longer than their weights.
"""

from __future__ import annotations

import copy
import itertools
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from benchmarks.gpu.models import build as build_shape
from benchmarks.gpu.sections import Run, release
from benchmarks.gpu.timing import device_ms
from tests.recurrent.steps import Step, draw_net
from torch import Tensor
from transformers import PreTrainedModel

from hone.attention import PackedContext, PagedContext
from hone.attention.recurrent import decode_kernel
from hone.attention.recurrent.decode_kernel import Tuning
from hone.attention.recurrent.mixing import DeltaHeads
from hone.families.registry import spec_of
from hone.families.spec import RecurrentLayers
from hone.models.contents import follow_inputs
from hone.models.decoder import alias_module, hidden_states
from hone.models.generation import GenerationModel, generation_model
from hone.segments import Segment, plan_segments

DEVICE = torch.device("cuda")
SECTIONS = ("kernel", "model", "tune", "step", "long", "parts")
MATRIX_RATE = 7.9e14
BLOCK_SIZE = 16
CONTEXT, LONG_CONTEXT = 1024, 16_384
BATCHES = (1, 64, 256)
MAX_CACHE_GB = 100
WORKERS = 12

MODELS = {"0.8B": "qwen3.5-0.8b", "9B": "qwen3.5-9b"}
"""Names of their public shapes."""
PEERS = {"0.8B": "qwen3-0.6b", "9B": "qwen3-8b"}
"""Models with attention in each layer, of about the same size."""
HEADS = {
    "0.8B": DeltaHeads(num_key_heads=16, num_value_heads=16, key_dim=128, value_dim=128),
    "9B": DeltaHeads(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128),
}
TUNINGS = (
    Tuning(16, 1),
    Tuning(16, 2),
    Tuning(16, 2, 128),
    Tuning(16, 4),
    Tuning(32, 2),
    Tuning(32, 4),
    Tuning(32, 4, 128),
    Tuning(32, 4, 96),
    Tuning(32, 8),
    Tuning(64, 4),
    Tuning(64, 8, 128),
    Tuning(64, 16),
    Tuning(128, 8, 128),
    Tuning(128, 16),
    Tuning(128, 16, 64),
)


def build(name: str, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> PreTrainedModel:
    """One of `MODELS`, with norms, decays and steps away from where they start."""
    model = build_shape(MODELS[name], dtype=dtype, **fields)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def short(tuning: Tuning) -> str:
    return "/".join("-" if value is None else str(value) for value in tuning)


def graph_us(work: Callable[[], object], repeats: int = 9) -> float:
    """Median microseconds of a replay of what `work` launches."""
    graph = recorded(work)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for _ in range(2):
        graph.replay()
    for event in events[:-1]:
        event.record()
        graph.replay()
    events[-1].record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return 1e3 * times[repeats // 2]


def recorded(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def bandwidth() -> float:
    """Bytes a second of a copy, read and written, which no graph holds: there it is slower."""
    source = torch.empty(1 << 30, dtype=torch.float32, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (device_ms(lambda: target.copy_(source), 9) * 1e-3)


def distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


# ---------------------------------------------------------------- the kernel


def mixed(step: Step, tuning: Tuning | None = None) -> Tensor:
    return decode_kernel.mix_heads(step.projected, step.net, step.context, tuning=tuning)


def draw_step(heads: DeltaHeads, batch: int, seed: int = 0) -> Step:
    net = draw_net(heads, torch.bfloat16, device=DEVICE, seed=seed)
    rows = torch.randperm(batch + 3, generator=torch.Generator().manual_seed(seed))[:batch]
    return Step.draw(net, rows.tolist(), batch + 3, seed=seed + 1)


def kernel(run: Run) -> None:
    """Two tokens; the distance of outputs and states is that of the last."""
    run.row("kernel against float32", "outputs", "torch's", "states", "torch's", "tails", "")
    for (name, heads), batch in itertools.product(HEADS.items(), (1, 7, 64, 256)):
        step = draw_step(heads, batch)
        exact, plain = step.copy(torch.float32), step.copy()
        for number in range(2):
            projected = Step.draw(step.net, range(batch), 1, seed=9 + number).projected
            for each in (step, exact, plain):
                each.projected.copy_(projected)
            found, right, theirs = mixed(step), exact.reference(), plain.reference()
        ours = distance(found, right), distance(step.states, exact.states)
        torchs = distance(theirs, right), distance(plain.states, exact.states)
        tails = torch.equal(step.tails, plain.tails)
        good = tails and all(a < 1.3 * b + 1e-4 for a, b in zip(ours, torchs, strict=True))
        cells = (f"{x:.2e}" for x in (ours[0], torchs[0], ours[1], torchs[1]))
        run.check(f"{name}, {batch} sequences", good, *cells, tails)
    check_recorded(run)


def check_recorded(run: Run) -> None:
    """Replays of a graph, and other launch parameters, have the bits of eager calls."""
    for name, heads in HEADS.items():
        step = draw_step(heads, 64)
        twin, before = step.copy(), step.copy()
        eager = [mixed(twin).clone() for _ in range(3)]
        output: list[Tensor] = []
        graph = recorded(lambda step=step, output=output: output.append(mixed(step)))
        step.states.copy_(before.states)
        step.tails.copy_(before.tails)
        replayed: list[Tensor] = []
        for _ in eager:
            graph.replay()
            replayed.append(output[-1].clone())
        same = all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))
        run.check(f"{name}, recorded equals eager", same and torch.equal(step.states, twin.states))
        worst = 0.0
        right = before.copy(torch.float32)
        expected = right.reference()
        for tuning in TUNINGS:
            other = before.copy()
            worst = max(worst, distance(mixed(other, tuning), expected))
            worst = max(worst, distance(other.states, right.states))
        run.check(f"{name}, all launch parameters", worst < 1e-2, f"{worst:.2e}")


def step_bytes(step: Step) -> int:
    """What one launch has to read and write."""
    share = len(step.rows) / len(step.states)
    stored = 2 * share * (step.states.nbytes + step.tails.nbytes)
    return int(stored) + step.projected.nbytes + step.projected.nbytes // 3


def compiled(task: tuple[str, Tuning]) -> str:
    """Empty, or why this one cannot be."""
    name, tuning = task
    try:
        mixed(draw_step(HEADS[name], 2), tuning)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  # printed; others go on
        return f"{name} {short(tuning)}: {type(error).__name__} {str(error)[:200]}"
    return ""


def compile_all() -> list[str]:
    """Fills triton's cache on the disk by several processes."""
    tasks = list(itertools.product(HEADS, TUNINGS))
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        return [text for text in pool.map(compiled, tasks) if text]


def tune(run: Run) -> None:
    rate = bandwidth()
    for name, heads in HEADS.items():
        batches = (1, 8, *BATCHES[1:])
        found: dict[int, dict[Tuning, float]] = defaultdict(dict)
        for batch in batches:
            one = draw_step(heads, batch)
            # More than the L2 holds, as in a whole step.
            count = max(4, min(96, (512 << 20) // step_bytes(one)))
            steps = [one, *(one.copy() for _ in range(count - 1))]
            for tuning in TUNINGS:
                us = graph_us(partial(all_mixed, steps, tuning), 5) / count
                found[batch][tuning] = us
            limit = step_bytes(one) / rate * 1e6
            chosen = decode_kernel.choose_tuning(heads)
            us = graph_us(partial(all_mixed, steps, chosen), 5) / count
            best = min(found[batch], key=found[batch].__getitem__)
            run.row(
                f"{name}, {batch} sequences: limit, chosen, best us",
                limit,
                us,
                f"{limit / us:.0%}",
                found[batch][best],
                f"{limit / found[batch][best]:.0%}",
                short(best),
            )
            del one, steps
        run.row(f"{name}: us by columns/warps/registers", *(f"B={b}" for b in batches))
        for tuning in TUNINGS:
            run.row(f"  {short(tuning)}", *(found[batch][tuning] for batch in batches))


def all_mixed(steps: Sequence[Step], tuning: Tuning) -> None:
    for step in steps:
        mixed(step, tuning)


# ---------------------------------------------------------------- whole models


def recurrent_layers(config: Any) -> RecurrentLayers | None:
    return spec_of(config.model_type).recurrent_layers(config.to_dict())


@dataclass
class Cache:
    """Keys and values of B sequences of `length` tokens at most, and their states."""

    model: PreTrainedModel
    batch: int
    length: int

    def __post_init__(self) -> None:
        config, dtype = self.model.config, self.model.dtype
        layers = recurrent_layers(config)
        self.width = -(-self.length // BLOCK_SIZE)
        order = torch.randperm(self.batch * self.width, generator=torch.Generator().manual_seed(0))
        self.tables = order.view(self.batch, self.width)
        shape = (2, len(order), BLOCK_SIZE, config.num_key_value_heads, config.head_dim)

        def normal(size: tuple[int, ...], kind: torch.dtype) -> Tensor:
            return torch.empty(size, dtype=kind, device=DEVICE).normal_(std=0.5)

        self.states: list[tuple[Tensor, Tensor] | None] = [None] * config.num_hidden_layers
        for index in () if layers is None else layers.indices:
            tails = (self.batch + 1, layers.kernel_size - 1, layers.num_channels)
            heads = (self.batch + 1, layers.num_value_heads, layers.key_dim, layers.value_dim)
            self.states[index] = normal(tails, dtype), normal(heads, torch.float32)
        none = torch.empty(2, 0, dtype=dtype, device=DEVICE)
        self.keys = [none if states else normal(shape, dtype) for states in self.states]

    def context(
        self, starts: Sequence[int], sizes: Sequence[int], *, is_decode: bool
    ) -> tuple[Tensor, PagedContext]:
        """Positions, and the context of the next `sizes` tokens of each sequence."""
        positions = [torch.arange(s, s + n) for s, n in zip(starts, sizes, strict=True)]
        slots = [
            self.tables[i, where // BLOCK_SIZE] * BLOCK_SIZE + where % BLOCK_SIZE
            for i, where in enumerate(positions)
        ]
        lengths = [s + n for s, n in zip(starts, sizes, strict=True)]
        borders = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32)
        segments = [
            Segment(int(border), size, read=row if start else None, writes=(row,))
            for row, (border, start, size) in enumerate(
                zip(borders[:-1].tolist(), starts, sizes, strict=True)
            )
        ]
        return torch.cat(positions).to(DEVICE), PagedContext(
            kv_caches=self.keys,
            block_tables=self.tables[: len(sizes)].to(DEVICE, torch.int32),
            slot_mapping=torch.cat(slots).to(DEVICE),
            cu_seqlens_q=borders.to(DEVICE),
            context_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
            max_seqlen_q=max(sizes),
            max_context_len=max(lengths),
            query_lens=() if is_decode else tuple(sizes),
            key_lens=() if is_decode else tuple(lengths),
            states=self.states,
            state_rows=torch.arange(len(sizes), device=DEVICE) if is_decode else None,
            segments=None if is_decode else plan_segments(segments, upload),
        )


def upload(values: Any) -> Tensor:
    return torch.from_numpy(values).to(DEVICE)


@torch.inference_mode()
def model(run: Run) -> None:
    """Chunks of three prompts and decoded tokens, against one forward of float32."""
    run.row("distance to float32", "fused", "transformers'", "")
    for name in MODELS:
        own = build(name, num_hidden_layers=8, vocab_size=4096)
        exact = copy.deepcopy(own).float()
        alias = alias_module(own)
        for other in (exact, alias):
            follow_inputs(other)
        generation = generation_model(own, compile=False)
        steps = [[200, 33, 64], [57, 100, 1], *[[1, 1, 1]] * 8]
        lengths = [sum(sizes) for sizes in zip(*steps, strict=True)]
        ids = [torch.randint(4096, (n,), device=DEVICE) for n in lengths]

        def fed(
            forward: Callable[..., Tensor], record: bool = False, ids=ids, own=own, steps=steps
        ) -> Tensor:
            cache, starts = Cache(own, 3, 512), [0, 0, 0]
            rows: list[list[Tensor]] = [[], [], []]
            for sizes in steps:
                where = zip(ids, starts, sizes, strict=True)
                chunk = torch.cat([x[s : s + n] for x, s, n in where])
                is_decode = max(sizes) == 1
                positions, context = cache.context(starts, sizes, is_decode=is_decode)
                call = partial(forward, chunk, positions, context)
                out = replayed(call, cache) if record and is_decode else call()
                for row, part in zip(rows, out.split(sizes), strict=True):
                    row.append(part)
                starts = [s + n for s, n in zip(starts, sizes, strict=True)]
            return torch.cat([torch.cat(row) for row in rows]).float()

        positions = torch.cat([torch.arange(n, device=DEVICE) for n in lengths])
        packed = PackedContext.from_lengths(lengths, device=DEVICE)
        expected = hidden_states(exact, torch.cat(ids), positions, packed)
        ours, again = (fed(generation.hidden_states, record) for record in (False, True))
        theirs = fed(partial(hidden_states, alias))
        found, reference = (distance(x, expected) for x in (ours, theirs))
        cells = f"{found:.2e}", f"{reference:.2e}"
        run.check(f"{name}, 8 layers", found < 1.1 * reference, *cells)
        run.check(f"{name}, recorded equals eager", torch.equal(ours, again))


def replayed(call: Callable[[], Tensor], cache: Cache) -> Tensor:
    """What a replay of a graph returns, after a warm-up that leaves no trace in the states."""
    kept = [states and tuple(x.clone() for x in states) for states in cache.states]
    output: list[Tensor] = []
    graph = recorded(lambda: output.append(call()))
    for states, copies in zip(cache.states, kept, strict=True):
        for stored, before in zip(states or (), copies or (), strict=True):
            stored.copy_(before)
    output[-1].fill_(float("nan"))
    graph.replay()
    return output[-1].clone()


@dataclass(frozen=True)
class Limit:
    """Bytes of a decode step by what they are, and the seconds that it takes at least."""

    weights: int
    keys: int
    states: int
    seconds: float

    @classmethod
    def of(cls, own: PreTrainedModel, cache: Cache, rate: float) -> Limit:
        weights = sum(p.nbytes for p in own.parameters())  # the embedding once where it is tied
        if not own.config.tie_word_embeddings:
            weights -= own.get_input_embeddings().weight.nbytes
        keys = sum(x.nbytes for x in cache.keys)
        stored = sum(x.nbytes for states in cache.states for x in states or ())
        states = 2 * stored * cache.batch // (cache.batch + 1)
        products = max(weights / rate, weights * cache.batch / MATRIX_RATE)  # 2 FLOPs, 2 bytes
        return cls(weights, keys, states, products + (keys + states) / rate)


def decode_call(
    generation: GenerationModel, own: PreTrainedModel, batch: int, length: int
) -> tuple[Callable[[], Tensor], Cache]:
    """A step from ids to logits, whose sequences then have `length` tokens."""
    cache = Cache(own, batch, length)
    starts, sizes = [length - 1] * batch, [1] * batch
    positions, context = cache.context(starts, sizes, is_decode=True)
    ids = torch.randint(4096, (batch,), device=DEVICE)
    return lambda: generation.logits(generation.hidden_states(ids, positions, context)), cache


_MODELS: dict[str, tuple[PreTrainedModel, GenerationModel]] = {}
"""Of the section before, since drawing weights takes long."""


def whole_model(name: str) -> tuple[PreTrainedModel, GenerationModel]:
    if name not in _MODELS:
        own = build(name) if name in MODELS else build_shape(name)
        _MODELS[name] = (own, generation_model(own, compile=False))
    return _MODELS[name]


def step(run: Run) -> None:
    time_steps(run, CONTEXT)


def long(run: Run) -> None:
    time_steps(run, LONG_CONTEXT)


def time_steps(run: Run, length: int) -> None:
    rate = bandwidth()
    run.row(f"a copy moves {rate / 1e12:.2f} TB/s")
    run.row(
        f"decode step, context {length}, logits included",
        "weights GB",
        "keys GB",
        "states GB",
        "limit ms",
        "ms",
        "share",
    )
    for name, batch in itertools.product(
        (name for pair in PEERS.items() for name in pair), BATCHES
    ):
        own, generation = whole_model(name)
        if cache_gb(own, batch, length) > MAX_CACHE_GB or not run.has_time(f"{name}, {batch}"):
            continue
        with run.attempt(f"{name}, {batch} sequences"):
            call, cache = decode_call(generation, own, batch, length)
            limit = Limit.of(own, cache, rate)
            ms = graph_us(call, 15) / 1e3
            numbers = (limit.weights, limit.keys, limit.states)
            run.row(
                f"{name}, {batch} sequences",
                *(f"{number / 1e9:.2f}" for number in numbers),
                f"{limit.seconds * 1e3:.3f}",
                f"{ms:.3f}",
                f"{limit.seconds * 1e3 / ms:.0%}",
            )
            del call, cache
        release()


def cache_gb(own: PreTrainedModel, batch: int, length: int) -> float:
    """Of the keys and values of `batch` sequences."""
    config, layers = own.config, recurrent_layers(own.config)
    num_layers = config.num_hidden_layers - (len(layers.indices) if layers else 0)
    token_bytes = 4 * num_layers * config.num_key_value_heads * config.head_dim
    return batch * length * token_bytes / 1e9


def parts(run: Run) -> None:
    for name in MODELS:
        own, generation = whole_model(name)
        call, _ = decode_call(generation, own, 64, CONTEXT)
        graph, repeats = recorded(call), 5
        graph.replay()
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(repeats):
                graph.replay()
            torch.cuda.synchronize()
        times: dict[str, list[float]] = defaultdict(list)
        for event in profile.events():
            if event.device_type.name == "CUDA":
                times[event.name].append(event.time_range.elapsed_us())
        total = sum(map(sum, times.values())) / repeats
        run.row(f"{name}, 64 sequences: kernels of a step", "launches", "us each", "us", "share")
        for kind, found in sorted(times.items(), key=lambda item: -sum(item[1]))[:14]:
            us = sum(found) / repeats
            count = len(found) / repeats
            run.row(f"  {kind[:42]}", count, us / count, us, f"{us / total:.0%}")
        run.row("  all, which overlap", sum(map(len, times.values())) / repeats, "", total)


def main() -> None:
    run = Run(__doc__, SECTIONS, seconds=150)
    run.row(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if {"kernel", "tune"} & set(run.chosen):
        for text in compile_all():
            run.check(text, False)
        run.note("compiled")
    work = (kernel, model, tune, step, long, parts)
    with torch.inference_mode():
        sys.exit(
            run.go({name: partial(part, run) for name, part in zip(SECTIONS, work, strict=True)})
        )


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    main()
