"""The CUDA attention against float64, and the time of decode.

    python -m benchmarks.gpu.attention_check [SECTION ...] [--seconds N]

Sections:

    cases   packed forward and gradients, prefill, decode, a captured graph: the largest errors of
            each head layout and number format
    spans   packed forward and gradients, and prefill, where tokens of images see each other in both
            directions
    shared  decode of shared prefixes, launched again and again beside a busy stream; counts the
            launches that differ by a bit from the first
    times   decode steps, and the memory traffic that they achieve

Outputs are compared token by token (the largest error of a token over its largest value), gradients
as a whole.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from benchmarks.gpu.sections import Run
from torch import Tensor

from hone.attention import PackedContext, PagedContext, SharedPrefix
from hone.attention.backends import (
    choose_packed_backend,
    choose_paged_backend,
    packed_attention,
    paged_attention,
    write_kv,
)
from hone.attention.context import FP8_DTYPE, make_spans
from hone.attention.triton_decode import decode_attention
from hone.engine.settings import SHARED_PREFIX_MEMBERS
from hone.model_input import TEXT, Content, ModelInput, content_spans
from hone.types import IndexedKeys, PackedKeys, Spans

Ints = np.ndarray[Any, np.dtype[Any]]
DEVICE = torch.device("cuda")
HEADS = [(16, 8, 128), (32, 8, 128), (14, 2, 64), (8, 4, 256), (20, 1, 80)]
OPTIONS = [{}, {"window": 100}, {"softcap": 5.0}, {"softcap": 5.0, "window": 100}]
LENGTHS = (1, 257, 64, 513, 16, 1, 300)
LIMITS = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}


def normal(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    draw = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=draw, device=DEVICE).to(dtype)


def attend(q, k, v, *, scale, window=None, softcap=None, images: ModelInput = TEXT) -> Tensor:
    """Float64 reference of one sequence: queries [L, Hq, D] are the last tokens of K keys. Tokens
    of one of `images` see each other in both directions."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    num_queries, num_keys = scores.shape[1:]
    rows = torch.arange(num_keys - num_queries, num_keys, device=q.device)
    keys = torch.arange(num_keys, device=q.device)
    distance, hidden = rows[:, None] - keys, rows[:, None] < keys
    for image in images.contents:
        ours, theirs = ((x >= image.start) & (x < image.stop) for x in (rows, keys))
        hidden &= ~(ours[:, None] & theirs)
    hidden |= distance >= (window or num_keys)
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1)


def error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).abs().max() / expected.abs().max()).item()


def token_error(actual: Tensor, expected: Tensor) -> float:
    worst = (actual.double() - expected).abs().amax((1, 2)) / expected.abs().amax((1, 2))
    return worst.max().item()


def images_of(*places: tuple[int, int]) -> ModelInput:
    """Images, each by first token and number of tokens."""
    return ModelInput(
        tuple(Content(kind="image", hash=str(s), start=s, num_tokens=n) for s, n in places)
    )


def packed_context(images: Sequence[ModelInput]) -> PackedContext:
    """The context of rows of `LENGTHS` with images."""
    context = PackedContext.from_lengths(LENGTHS, device=DEVICE)
    found = content_spans(images, [0] * len(LENGTHS), LENGTHS)
    if not found:
        return context
    begins, stops = [0, *accumulate(LENGTHS)], [span.stop for span in found]
    index = np.concatenate([begins[x.sequence] + np.arange(x.stop) for x in found])
    starts = np.cumsum([0, *np.bincount(index, minlength=sum(LENGTHS))])
    keys = PackedKeys(
        **index_of(index, stops),
        uses=upload(np.argsort(index, kind="stable").astype(np.int32)),
        uses_starts=upload(starts.astype(np.int32)),
    )
    return dataclasses.replace(context, spans=make_spans(found, keys, upload))


def index_of(index: Ints, lengths: Sequence[int]) -> dict[str, Any]:
    """The fields of `IndexedKeys`."""
    return {
        "index": upload(index),
        "cu_seqlens": upload(np.cumsum([0, *lengths], dtype=np.int32)),
        "max_seqlen": max(lengths),
        "lengths": tuple(lengths),
    }


def upload(values: Ints) -> Tensor:
    return torch.from_numpy(values).to(DEVICE)


def stored_spans(context: PagedContext, images: Sequence[ModelInput]) -> Spans:
    """The spans of chunks, with their keys in the cache."""
    starts = [k - q for q, k in zip(context.query_lens, context.key_lens, strict=True)]
    found = content_spans(images, starts, context.query_lens)
    tables, size = context.block_tables.cpu().numpy(), context.kv_caches[0].shape[2]
    parts = [(tables[x.sequence].astype(np.int64), np.arange(x.stop)) for x in found]
    slots = np.concatenate([table[at // size] * size + at % size for table, at in parts])
    keys = IndexedKeys(**index_of(slots, [span.stop for span in found]))
    return make_spans(found, keys, upload)


def check_packed(heads, dtype, options, images=(TEXT,) * 7) -> dict[str, float]:
    num_heads, num_kv_heads, head_dim = heads
    total, scale = sum(LENGTHS), head_dim**-0.5
    q = normal(total, num_heads, head_dim, dtype=dtype, seed=0)
    k = normal(total, num_kv_heads, head_dim, dtype=dtype, seed=1)
    v = normal(total, num_kv_heads, head_dim, dtype=dtype, seed=2)
    cotangent = normal(total, num_heads, head_dim, dtype=dtype, seed=3)
    ours = [x.clone().requires_grad_() for x in (q, k, v)]
    context = packed_context(images)
    actual = packed_attention(*ours, context, scale=scale, **options)
    grads = torch.autograd.grad(actual, ours, cotangent)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    pieces = zip(*(x.split(LENGTHS) for x in exact), strict=True)
    expected = torch.cat(
        [
            attend(*piece, scale=scale, images=own, **options)
            for piece, own in zip(pieces, images, strict=True)
        ]
    )
    exact_grads = torch.autograd.grad(expected, exact, cotangent.double())
    names = ("dq", "dk", "dv")
    return {
        "forward": token_error(actual, expected),
        **{n: error(a, e) for n, a, e in zip(names, grads, exact_grads, strict=True)},
    }


def paged(query_lens, key_lens, heads, dtype, *, block_size=16):
    """Queries, newest keys and values, a cache without the newest, the context, all keys."""
    num_heads, num_kv_heads, head_dim = heads
    total = sum(query_lens)
    keys, values = (
        [
            normal(n, num_kv_heads, head_dim, dtype=dtype, seed=97 * i + j)
            for i, n in enumerate(key_lens)
        ]
        for j in (1, 2)
    )
    num_blocks = [-(-n // block_size) for n in key_lens]
    order = torch.randperm(sum(num_blocks), generator=torch.Generator().manual_seed(0))
    tables = torch.zeros(len(key_lens), max(num_blocks), dtype=torch.int32)
    kv_cache = normal(2, sum(num_blocks), block_size, num_kv_heads, head_dim, dtype=dtype, seed=5)
    slots, flat = [], kv_cache.view(2, -1, num_kv_heads, head_dim)
    for i, blocks in enumerate(order.split(num_blocks)):
        tables[i, : len(blocks)] = blocks
        where = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()
        old, n = key_lens[i] - query_lens[i], key_lens[i]
        flat[0, where[:old].to(DEVICE)] = keys[i][:old]
        flat[1, where[:old].to(DEVICE)] = values[i][:old]
        slots.append(where[old:n])
    k, v = (
        torch.cat([x[-m:] for x, m in zip(rows, query_lens, strict=True)])
        for rows in (keys, values)
    )
    is_decode = max(query_lens) == 1
    context = PagedContext(
        kv_caches=[kv_cache],
        block_tables=tables.to(DEVICE),
        slot_mapping=torch.cat(slots).to(DEVICE),
        cu_seqlens_q=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=DEVICE),
        context_lens=torch.tensor(key_lens, dtype=torch.int32, device=DEVICE),
        max_seqlen_q=max(query_lens),
        max_context_len=max(key_lens),
        query_lens=() if is_decode else tuple(query_lens),
        key_lens=() if is_decode else tuple(key_lens),
    )
    return (
        normal(total, num_heads, head_dim, dtype=dtype, seed=9),
        k,
        v,
        kv_cache,
        context,
        keys,
        values,
    )


def check_paged(query_lens, key_lens, heads, dtype, options, *, images=None) -> float:
    scale = heads[2] ** -0.5
    q, k, v, kv_cache, context, keys, values = paged(query_lens, key_lens, heads, dtype)
    write_kv(k, v, kv_cache, context.slot_mapping)
    if images is not None:
        context.spans = stored_spans(context, images)
    actual = paged_attention(q, k, v, kv_cache, context, scale=scale, **options)
    rows = zip(q.split(list(query_lens)), keys, values, strict=True)
    expected = [
        attend(*row, scale=scale, images=own, **options)
        for row, own in zip(rows, images or [TEXT] * len(keys), strict=True)
    ]
    return token_error(actual, torch.cat(expected))


def check_graph(heads, dtype) -> float:
    """A captured decode step, replayed after all lengths have grown."""
    scale, long = heads[2] ** -0.5, [700, 64, 333, 512]
    q, k, v, kv_cache, context, keys, values = paged([1] * 4, long, heads, dtype)
    write_kv(k, v, kv_cache, context.slot_mapping)
    final = context.context_lens.clone()
    context.context_lens.fill_(5)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        paged_attention(q, k, v, kv_cache, context, scale=scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = paged_attention(q, k, v, kv_cache, context, scale=scale)
    context.context_lens.copy_(final)
    graph.replay()
    rows = zip(q.split([1] * 4), keys, values, strict=True)
    return token_error(actual, torch.cat([attend(*row, scale=scale) for row in rows]))


def random_groups(batch: int, tables: Tensor, block_size: int) -> tuple[SharedPrefix, list[int]]:
    """Groups of up to eight rows anywhere in the batch, put into their tables; all lengths."""
    draw = random.Random(batch)
    order = draw.sample(range(batch), batch)
    rows = torch.full((batch // 2, SHARED_PREFIX_MEMBERS), -1, dtype=torch.int32)
    lens = torch.zeros(batch // 2, dtype=torch.int32)
    starts = torch.zeros(batch, dtype=torch.int32)
    for group in range(batch // 2):
        size = draw.randint(2, SHARED_PREFIX_MEMBERS)
        members, order = order[:size], order[size:]
        if len(members) < 2:
            break
        blocks = draw.randint(1, tables.shape[1] // 2)
        rows[group, : len(members)] = torch.tensor(members, dtype=torch.int32)
        lens[group] = starts[members] = blocks * block_size
        tables[members, :blocks] = tables[members[0], :blocks].clone()
    longest = tables.shape[1] * block_size
    lengths = [draw.randint(start + 1, longest) for start in starts.tolist()]
    return SharedPrefix(
        rows=rows.to(DEVICE), lens=lens.to(DEVICE), starts=starts.to(DEVICE)
    ), lengths


def check_shared(heads, batch: int, *, is_fp8: bool, launches: int = 100) -> tuple[int, float]:
    """Launches that differ from the first by a bit, and the error against decode without groups.

    Work of another stream delays some programs more than others, so that splits end in another
    order in each launch.
    """
    (num_heads, num_kv_heads, head_dim), block_size, width = heads, 16, 48
    tables = torch.randperm(batch * width, generator=torch.Generator().manual_seed(0))
    tables = tables.to(torch.int32).view(batch, width)
    shared, lengths = random_groups(batch, tables, block_size)
    shape = (2, batch * width, block_size, num_kv_heads, head_dim)
    kv_cache = normal(*shape, dtype=torch.bfloat16, seed=0)
    q = normal(batch, num_heads, head_dim, dtype=torch.bfloat16, seed=1)
    tables, scales = tables.to(DEVICE), None
    lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    if is_fp8:
        scales = torch.full((2, num_kv_heads), 0.9, device=DEVICE)
        kv_cache = kv_cache.to(FP8_DTYPE)

    def decode(shared: SharedPrefix | None) -> Tensor:
        longest, scale = width * block_size, head_dim**-0.5
        return decode_attention(
            q, kv_cache, tables, lengths, longest, scale=scale, scales=scales, shared=shared
        )

    side, draw, outputs = torch.cuda.Stream(), random.Random(0), []
    expected = decode(None)
    noise = normal(2048, 2048, dtype=torch.bfloat16, seed=2)
    torch.cuda.synchronize()
    for _ in range(launches):
        with torch.cuda.stream(side):
            for _ in range(draw.randint(0, 3)):
                size = 64 * draw.randint(1, 32)
                torch.mm(noise[:size], noise)
        torch.cuda._sleep(draw.randint(0, 40_000))  # cycles
        outputs.append(decode(shared))
    torch.cuda.synchronize()
    bits = torch.stack(outputs).view(torch.int16).flatten(1)
    differing = int((bits != bits[0]).any(1).sum())
    return differing, token_error(outputs[0], expected.double())


def time_decode(batch: int, length: int, heads, dtype) -> tuple[float, float, float]:
    """Seconds of attention, of the KV write, and bytes per second that attention reads."""
    q, k, v, kv_cache, context, *_ = paged([1] * batch, [length] * batch, heads, dtype)
    scale = heads[2] ** -0.5
    attention_s = seconds(lambda: paged_attention(q, k, v, kv_cache, context, scale=scale))
    write_s = seconds(lambda: write_kv(k, v, kv_cache, context.slot_mapping))
    traffic = 2 * batch * length * heads[1] * heads[2] * kv_cache.element_size()
    return attention_s, write_s, traffic / attention_s


def seconds(call, repeats: int = 50) -> float:
    """Median device time, the L2 cache emptied before each call."""
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device=DEVICE)
    times = []
    for _ in range(repeats + 5):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times[5:])[repeats // 2]


PAGED = {
    "prefill": ([65, 7, 300], [65, 7, 300]),
    "after prefix": ([65, 1, 200, 7], [1000, 64, 200, 135]),
    "decode": ([1] * 6, [1, 16, 17, 700, 2049, 128]),
    "decode 300": ([1] * 300, [33 + i for i in range(300)]),
}
"""Numbers of queries and of keys of each sequence."""


def cases(run: Run) -> Iterator[tuple[Any, torch.dtype, float, str]]:
    """Heads, format, largest error and name of each case, as long as there is time."""
    for heads in HEADS:
        for dtype, limit in LIMITS.items():
            name = f"{heads} {str(dtype).removeprefix('torch.')}"
            if not run.has_time(name):
                return
            yield heads, dtype, limit, name


def check_cases(run: Run) -> None:
    run.row("largest error of all options", "forward", "dq", "dk", "dv", *PAGED, "graph")
    for heads, dtype, limit, name in cases(run):
        with run.attempt(name):
            worst = worst_errors(heads, dtype)
            run.check(name, all(e <= limit for e in worst.values()), *worst.values())


IMAGES = (
    TEXT,
    images_of((10, 100), (110, 100)),  # they adjoin
    TEXT,
    images_of((5, 256), (400, 64)),  # larger than the window, and smaller
    images_of((0, 16)),
    TEXT,
    images_of((200, 100)),
)
"""Images of each of `LENGTHS`."""
PAGED_IMAGES = (
    ([65, 7, 300], [65, 7, 300], [images_of((1, 64)), TEXT, images_of((7, 256))]),
    ([65, 1, 200], [1000, 64, 200], [images_of((9, 90), (900, 64)), TEXT, images_of((0, 200))]),
    ([165, 90], [1000, 300], [images_of((744, 256)), images_of((100, 200))]),  # begun earlier
)
"""Numbers of queries and of keys of each sequence, and its images."""


def check_spans(run: Run) -> None:
    run.row("largest error of all options", "forward", "dq", "dk", "dv", "prefill")
    for heads, dtype, limit, name in cases(run):
        with run.attempt(name):
            found: defaultdict[str, list[float]] = defaultdict(list)
            for options in OPTIONS:
                for part, value in check_packed(heads, dtype, options, IMAGES).items():
                    found[part].append(value)
                for queries, keys, images in PAGED_IMAGES:
                    value = check_paged(queries, keys, heads, dtype, options, images=images)
                    found["prefill"].append(value)
            worst = [torch.tensor(values).max().item() for values in found.values()]
            run.check(name, all(e <= limit for e in worst), *worst)


def worst_errors(heads, dtype) -> dict[str, float]:
    found: defaultdict[str, list[float]] = defaultdict(list)
    for options in OPTIONS:
        for name, value in check_packed(heads, dtype, options).items():
            found[name].append(value)
        for name, lengths in PAGED.items():
            found[name].append(check_paged(*lengths, heads, dtype, options))
    if dtype == torch.bfloat16:
        found["graph"].append(check_graph(heads, dtype))
    # Not Python's max, which may lose a nan.
    return {name: torch.tensor(values).max().item() for name, values in found.items()}


def check_shared_prefixes(run: Run) -> None:
    run.row("decode of shared prefixes", "differ", "error")
    for heads in HEADS[:2]:
        for is_fp8 in (False, True):
            for batch in (16, 64, 300):
                name = f"{heads}, {batch} sequences{', FP8' * is_fp8}"
                if not run.has_time(name):
                    return
                with run.attempt(name):
                    differing, value = check_shared(heads, batch, is_fp8=is_fp8)
                    good = differing == 0 and value <= LIMITS[torch.bfloat16]
                    run.check(name, good, differing, value)


def time_decodes(run: Run) -> None:
    run.row("decode, bfloat16", "attention us", "write us", "read TB/s")
    for heads in HEADS[:3]:
        for batch, length in ((256, 1024), (256, 256), (16, 8192), (1, 8192)):
            attention_s, write_s, rate = time_decode(batch, length, heads, torch.bfloat16)
            name = f"{heads}, {batch} x {length}"
            run.row(name, attention_s * 1e6, write_s * 1e6, rate / 1e12)


def main() -> None:
    names = ("cases", "spans", "shared", "times")
    run = Run(__doc__, names, seconds=240)
    run.row(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    packed = choose_packed_backend(DEVICE, torch.bfloat16, head_dim=128, softcap=None)
    run.row(f"decode: {choose_paged_backend(DEVICE)}; packed bfloat16: {packed}")
    work = (check_cases, check_spans, check_shared_prefixes, time_decodes)
    sys.exit(run.go({name: partial(part, run) for name, part in zip(names, work, strict=True)}))


if __name__ == "__main__":
    main()
