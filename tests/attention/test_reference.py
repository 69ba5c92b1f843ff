"""The torch implementations against one-query-at-a-time float64 twins."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.attention import reference
from tests.attention.twin import Pages, attend_packed
from tests.tables import table

SCALE = 0.3
OPTIONS = [
    {},
    {"window": 3},
    {"window": 100},  # longer than all
    {"softcap": 0.7},
    {"softcap": 0.7, "window": 4},
]
HEADS = [(4, 2), (6, 1), (3, 3)]


def random_qkv(num_tokens, heads, *, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randn(num_tokens, h, 8, generator=draw, dtype=dtype)
        for h in (heads[0], heads[1], heads[1])
    ]


def check_packed(lengths, heads, options, attend=reference.packed_attention, seed=0):
    """Forward and all three gradients equal the twin's."""
    qkv = [x.requires_grad_() for x in random_qkv(sum(lengths), heads, seed=seed)]
    actual = attend(*qkv, tuple(lengths), scale=SCALE, **options)
    expected = attend_packed(*qkv, lengths, scale=SCALE, **options)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    cotangent = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad(actual, qkv, cotangent),
        torch.autograd.grad(expected, qkv, cotangent),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@table("heads", HEADS)
@table("options", OPTIONS)
def test_packed_equals_twin(heads, options):
    check_packed([5, 1, 9, 1, 6, 9, 2], heads, options)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.sampled_from(OPTIONS))
def test_packed_equals_twin_for_any_lengths(lengths, options):
    check_packed(lengths, (2, 1), options, seed=sum(lengths))


WRONG_PACKED = {
    "borders dropped": lambda q, k, v, lengths, **o: reference.packed_attention(
        q, k, v, (sum(lengths),), **o
    ),
    "border off by one": lambda q, k, v, lengths, **o: reference.packed_attention(
        q, k, v, (lengths[0] + 1, lengths[1] - 1, *lengths[2:]), **o
    ),
    "window off by one": lambda q, k, v, lengths, *, window, **o: reference.packed_attention(
        q, k, v, lengths, window=window + 1, **o
    ),
    "scale forgotten": lambda q, k, v, lengths, *, scale, **o: reference.packed_attention(
        q, k, v, lengths, scale=1.0, **o
    ),
}


@table("bug", WRONG_PACKED)
def test_R7_packed_check_catches(bug):
    with pytest.raises(AssertionError):
        check_packed([6, 4, 7], (4, 2), {"window": 3}, attend=WRONG_PACKED[bug])


def test_layout_born_in_inference_mode_serves_a_later_backward():
    lengths = (3, 5, 4, 11)
    q, k, v = random_qkv(sum(lengths), (2, 1))
    with torch.inference_mode():
        reference.packed_attention(q, k, v, lengths, scale=SCALE)
    q.requires_grad_()
    reference.packed_attention(q, k, v, lengths, scale=SCALE).sum().backward()
    assert q.grad is not None


def check_paged(query_lens, key_lens, options, *, mutate=lambda context: context, **shape):
    pages = Pages(query_lens, key_lens, dtype=torch.float64, **shape)
    context = mutate(pages.context)
    reference.write_kv(pages.k, pages.v, pages.kv_cache, context.slot_mapping)
    actual = reference.paged_attention(pages.q, pages.kv_cache, context, scale=SCALE, **options)
    torch.testing.assert_close(actual, pages.expected(scale=SCALE, **options), rtol=1e-6, atol=1e-6)


PAGED = [
    ([1, 1, 1, 1], [1, 9, 4, 17]),  # decode
    ([4, 7, 4], [4, 7, 4]),  # whole prompts
    ([3, 5, 1, 3, 1], [10, 5, 8, 3, 1]),  # chunks and decode
    ([4, 1], [8, 5]),  # a chunk ends on a block's border
]


@table("block_size", [1, 4, 16])
@table("query_lens, key_lens", PAGED)
@table("options", OPTIONS)
def test_paged_equals_twin(query_lens, key_lens, options, block_size):
    check_paged(query_lens, key_lens, options, block_size=block_size)


@table("heads", HEADS)
def test_paged_head_groups(heads):
    check_paged([2, 1], [6, 9], {}, num_heads=heads[0], num_kv_heads=heads[1])


def replaced(**changes):
    return lambda context: dataclasses.replace(
        context, **{name: change(getattr(context, name)) for name, change in changes.items()}
    )


WRONG_CONTEXT = {
    "blocks in order": replaced(block_tables=lambda tables: tables.sort(1).values),
    "tables swapped": replaced(block_tables=lambda tables: tables.flip(0)),
    "context one short": replaced(context_lens=lambda lengths: lengths - 1),
    "context one long": replaced(context_lens=lambda lengths: lengths + 1),
    "slots shifted": replaced(slot_mapping=lambda slots: slots.roll(1)),
}


@table("bug", WRONG_CONTEXT)
@table("query_lens", [[1, 1], [3, 2]])
def test_paged_check_catches(bug, query_lens):
    with pytest.raises(AssertionError):
        check_paged(query_lens, [14, 9], {}, mutate=WRONG_CONTEXT[bug])


def test_slot_minus_one_stores_nothing():
    k, v = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    kv_cache = torch.zeros(2, 3, 2, 2, 4)
    reference.write_kv(k, v, kv_cache, torch.tensor([4, -1, 1]))
    stored = kv_cache.view(2, 6, 2, 4)
    for row, rows in zip(stored, (k, v), strict=True):
        assert torch.equal(row[4], rows[0])
        assert torch.equal(row[1], rows[2])
        assert row.count_nonzero() == 2 * 8


@table("fp8", [False, True])
@table("options", OPTIONS)
def test_decode_equals_twin(options, fp8):
    pages = Pages([1] * 4, [3, 9, 4, 17], groups=[((1, 3), 8)], dtype=torch.float64, fp8=fp8)
    context = pages.decode_context(num_groups=1, members=2)
    reference.write_kv(pages.k, pages.v, pages.kv_cache, context.slot_mapping, pages.scales)
    actual = reference.paged_attention(
        pages.q, pages.kv_cache, context, pages.scales, scale=SCALE, **options
    )
    torch.testing.assert_close(actual, pages.expected(scale=SCALE, **options), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("query_lens", [[4, 7], [3, 1]], ids=["whole", "chunks"])
def test_fp8_prefill_equals_twin(query_lens):
    pages = Pages(query_lens, [14, 9], dtype=torch.float64, fp8=True)
    context = pages.context
    reference.write_kv(pages.k, pages.v, pages.kv_cache, context.slot_mapping, pages.scales)
    actual = reference.paged_attention(pages.q, pages.kv_cache, context, pages.scales, scale=SCALE)
    torch.testing.assert_close(actual, pages.expected(scale=SCALE), rtol=1e-5, atol=1e-6)


def test_fp8_values_saturate_and_minus_one_stores_nothing():
    k = torch.tensor([[[1e6, -1e6]], [[1.0, 2.0]]])
    kv_cache = torch.zeros(2, 1, 2, 1, 2).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.5], [2.0]])
    reference.write_kv(k, k, kv_cache, torch.tensor([1, -1]), scales)
    assert kv_cache.float().flatten(1).tolist() == [[0, 0, 448, -448], [0, 0, 448, -448]]
