"""Contents whose tokens attend to each other in both directions, against a dense mask."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from hone.attention import PackedContext, backends, flash
from hone.attention.context import make_spans
from hone.model_input import Content, ContentSpan, InputSpec, ModelInput, content_spans
from hone.trainer.collating import collate
from hone.trainer.prefixes import shared_prefixes
from hone.trainer.shard import whole_shard
from hone.types import IndexedKeys, Row
from tests.attention.twin import Pages
from tests.tables import table

BOTH_WAYS = InputSpec(kinds=frozenset({"image"}), attends_within=True)
SCALE = 0.3
OPTIONS = [
    {},
    {"window": 1},
    {"window": 3},  # smaller than most images
    {"window": 9},
    {"window": 1000},
    {"softcap": 0.7},
    {"softcap": 0.7, "window": 4},
]
HEADS = [(4, 2), (6, 1), (3, 3)]


def images(rng: random.Random, num_tokens: int, *, most: int = 3) -> ModelInput:
    """Up to `most` images at random, some of which adjoin."""
    found, start = [], rng.randint(0, 3)
    for number in range(rng.randint(0, most)):
        size = rng.randint(1, 7)
        if start + size > num_tokens:
            break
        found.append(Content(kind="image", hash=str(number), start=start, num_tokens=size))
        start += size + rng.choice((0, 0, 1, 4))
    return ModelInput(tuple(found))


def random_rows(rng: random.Random, num_rows: int = 5) -> list[Row]:
    rows = []
    for number in range(num_rows):
        length = rng.randint(2, 25)
        rows.append(
            Row(
                id=str(number),
                token_ids=[5] * length,
                loss_mask=[False] * (length - 1) + [True],
                model_input=images(rng, length),
            )
        )
    return rows


def mask_of(model_input: ModelInput, num_tokens: int, window: int | None) -> torch.Tensor:
    """Whether query i sees key j, as transformers' `create_masks_for_vision_model` says it: the
    window hides earlier keys, those of the own image too."""
    image = [-1] * num_tokens
    for number, content in enumerate(model_input.contents):
        image[content.start : content.stop] = [number] * content.num_tokens
    return torch.tensor(
        [
            [
                (j <= i or image[i] == image[j] >= 0) and (window is None or j > i - window)
                for j in range(num_tokens)
            ]
            for i in range(num_tokens)
        ]
    )


def dense(q, k, v, mask, *, scale=SCALE, softcap=None):
    """Attention of q [L, Hq, D] to k and v [K, Hkv, D] by a mask [L, K]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("lhd,khd->hlk", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hlk,khd->lhd", weights, v)


def qkv_of(num_tokens, heads, *, seed=0):
    draw = torch.Generator().manual_seed(seed)
    sizes = (heads[0], heads[1], heads[1])
    return [
        torch.randn(num_tokens, h, 8, generator=draw, dtype=torch.float64).requires_grad_()
        for h in sizes
    ]


def context_of(rows, prefixes=None) -> tuple[PackedContext, torch.Tensor]:
    """The context as a trainer makes it, and the packed place of each token of each row."""
    batch = collate(rows, [1.0] * len(rows), "cpu", prefixes=prefixes, inputs=BOTH_WAYS)
    places = torch.arange(batch.num_tokens) if batch.keys is None else batch.keys.index
    return whole_shard(batch, torch.device("cpu")).context, places


def check_packed(rows, heads, *, prefixes=None, window=None, softcap=None, seed=0):
    """Output and gradients are those of the dense mask."""
    context, places = context_of(rows, prefixes)
    qkv = qkv_of(context.num_tokens, heads, seed=seed)
    actual = backends.packed_attention(*qkv, context, scale=SCALE, window=window, softcap=softcap)
    expected = torch.zeros_like(actual)
    for row, own in zip(rows, places.split([row.num_tokens for row in rows]), strict=True):
        mask = mask_of(row.model_input, row.num_tokens, window)
        output = dense(*(x[own] for x in qkv), mask, softcap=softcap)
        expected = expected.index_copy(0, own, output)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    cotangent = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad(actual, qkv, cotangent),
        torch.autograd.grad(expected, qkv, cotangent),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def sharing_rows(rng: random.Random) -> list[Row]:
    """A group with one prompt of at least one image, then a row by itself."""
    length = rng.randint(30, 40)
    prompt = images(rng, length)
    rows = []
    for number in range(4):
        own = rng.randint(1, 5)
        rows.append(
            Row(
                id=f"g{number}",
                group_id="g",
                token_ids=[5] * length + [10 + number] * own,
                loss_mask=[False] * length + [True] * own,
                model_input=prompt,
            )
        )
    return [*rows, *random_rows(rng, 1)]


def span_kernel(q, k, v, *borders, scale, window_size, **_):
    """FlashAttention's contract: the queries are aligned with the last keys, and a bound of -1
    hides nothing."""
    borders_q, borders_k, max_q, max_k = borders
    rows = []
    for i in range(len(borders_q) - 1):
        own_q = q[borders_q[i] : borders_q[i + 1]]
        own_k, own_v = (x[borders_k[i] : borders_k[i + 1]] for x in (k, v))
        assert len(own_q) <= max_q
        assert len(own_k) <= max_k
        places = torch.arange(len(own_k))
        distance = places[len(own_k) - len(own_q) :, None] - places
        mask = torch.ones_like(distance, dtype=torch.bool)
        for bound, side in zip(window_size, (distance, -distance), strict=True):
            if bound >= 0:
                mask &= side <= bound
        rows.append(dense(own_q, own_k, own_v, mask, scale=scale))
    return torch.cat(rows)


@pytest.fixture(params=["reference", "flash", "flash4"])
def backend(request, monkeypatch):
    """Plain torch, and the calls of the kernels with a twin in the place of each kernel."""
    if request.param != "reference":
        from hone.attention import flash4

        monkeypatch.setattr(backends, "_packed_backend", lambda q, softcap: request.param)
        monkeypatch.setattr(flash, "varlen_attn", span_kernel)
        monkeypatch.setattr(flash4, "packed_attention", flash.packed_attention)
    return request.param


def serves(backend, options) -> bool:
    return backend == "reference" or "softcap" not in options


@table("heads", HEADS)
@table("options", OPTIONS)
def test_packed_rows_see_what_the_dense_mask_shows(backend, heads, options):
    seed = random.randrange(2**32)
    if serves(backend, options):
        check_packed(random_rows(random.Random(seed)), heads, seed=seed, **options)


@table("options", OPTIONS)
@table("number", range(3))
def test_rows_that_share_a_prompt_see_what_the_dense_mask_shows(backend, options, number):
    seed = random.randrange(2**32)
    rows = sharing_rows(random.Random(seed))
    prefixes = shared_prefixes(rows)
    assert prefixes[0] == prefixes[3] >= 30
    if serves(backend, options):
        check_packed(rows, (4, 2), prefixes=prefixes, seed=seed, **options)


def test_rows_without_images_have_no_spans():
    rows = [Row(id="a", token_ids=[1, 2, 3], loss_mask=[False, True, True])]
    assert context_of(rows)[0].spans is None
    rows[0].model_input = ModelInput((Content(kind="image", hash="", start=0, num_tokens=2),))
    assert context_of(rows)[0].spans is not None
    causal = InputSpec(kinds=frozenset({"image"}))
    assert collate(rows, [1.0], "cpu", inputs=causal).spans is None


# ---------------------------------------------------------------- paged


def chunks_of(rng: random.Random, num_sequences: int = 4):
    """Images, first tokens and ends of chunks that end inside no image; some begin inside one."""
    inputs, starts, ends = [], [], []
    for _ in range(num_sequences):
        length = rng.randint(2, 25)
        model_input = images(rng, length)
        allowed = [
            end
            for end in range(1, length + 1)
            if not any(c.start < end < c.stop for c in model_input.contents)
        ]
        end = rng.choice(allowed)
        inputs.append(model_input)
        starts.append(rng.randrange(end))
        ends.append(end)
    return inputs, starts, ends


def slots_of(context, sequence, num_tokens) -> torch.Tensor:
    tokens, size = torch.arange(num_tokens), context.kv_caches[0].shape[2]
    return context.block_tables[sequence][tokens // size].long() * size + tokens % size


def paged_spans(context, found):
    stops = [span.stop for span in found]
    keys = IndexedKeys(
        index=torch.cat([slots_of(context, span.sequence, span.stop) for span in found]),
        cu_seqlens=torch.tensor(np.cumsum([0, *stops]), dtype=torch.int32),
        max_seqlen=max(stops),
        lengths=tuple(stops),
    )
    return make_spans(found, keys, torch.from_numpy)


@table("options", OPTIONS)
@table("fp8", [False, True])
@table("number", range(4))
def test_chunks_see_what_the_dense_mask_shows(backend, options, fp8, number):
    rng = random.Random(random.randrange(2**32))
    inputs, starts, ends = chunks_of(rng)
    sizes = [end - start for start, end in zip(starts, ends, strict=True)]
    found = content_spans(inputs, starts, sizes)
    if not found or not serves(backend, options):
        return
    pages = Pages(sizes, ends, dtype=torch.float64, fp8=fp8)
    context = dataclasses.replace(pages.context, spans=paged_spans(pages.context, found))
    backends.write_kv(pages.k, pages.v, pages.kv_cache, context.slot_mapping, pages.scales)
    actual = backends.paged_attention(
        pages.q,
        pages.k,
        pages.v,
        pages.kv_cache,
        context,
        scales=pages.scales,
        scale=SCALE,
        **options,
    )
    expected = []
    softcap = options.get("softcap")
    for i, q in enumerate(pages.q.split(sizes)):
        mask = mask_of(inputs[i], ends[i], options.get("window"))[starts[i] :]
        keys, values = (x[i].double() for x in (pages.keys, pages.values))
        expected.append(dense(q, keys, values, mask, softcap=softcap))
    torch.testing.assert_close(actual, torch.cat(expected), rtol=1e-5, atol=1e-6)


def test_spans_of_slices():
    two = ModelInput(
        (
            Content(kind="image", hash="a", start=2, num_tokens=3),
            Content(kind="image", hash="b", start=5, num_tokens=4),
        )
    )
    found = content_spans([two, ModelInput(), two, two], [0, 0, 3, 9], [5, 2, 7, 3])
    assert found == [
        ContentSpan(sequence=0, place=2, size=3, stop=5),
        ContentSpan(sequence=2, place=7, size=2, stop=5),  # its first token is of an earlier pass
        ContentSpan(sequence=2, place=9, size=4, stop=9),
    ]
    with pytest.raises(AssertionError):
        content_spans([two], [0], [4])
