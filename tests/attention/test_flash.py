"""The calls made to FlashAttention, with a plain-torch kernel of the same contract in its place."""

from __future__ import annotations

import pytest
import torch

from hone.attention import PackedContext, flash, reference
from tests.attention.twin import Pages, attend_one, attend_packed
from tests.tables import table

SCALE = 0.3


def varlen_twin(  # noqa: PLR0917  # the kernel's own signature
    q,
    k,
    v,
    borders_q,
    borders_k,
    max_q,
    max_k,
    *,
    scale,
    window_size,
    enable_gqa=False,
):
    """Causal at the bottom right, `window_size` = (keys to the left, 0), as the kernel has it."""
    assert enable_gqa == flash._ASKS_FOR_SHARED_HEADS
    left, right = window_size
    assert right == 0
    window = None if left < 0 else left + 1
    rows = []
    for i in range(len(borders_q) - 1):
        queries = q[borders_q[i] : borders_q[i + 1]]
        keys, values = (x[borders_k[i] : borders_k[i + 1]] for x in (k, v))
        assert len(queries) <= max_q
        assert len(keys) <= max_k
        for t, query in enumerate(queries):
            seen = len(keys) - len(queries) + t + 1
            rows.append(attend_one(query, keys[:seen], values[:seen], scale=scale, window=window))
    return torch.stack(rows)


@pytest.fixture(autouse=True, params=[True, False], ids=["on-request", "always"])
def _kernel_twin(request, monkeypatch):
    monkeypatch.setattr(flash, "varlen_attn", varlen_twin)
    monkeypatch.setattr(flash, "_ASKS_FOR_SHARED_HEADS", request.param)


@table("window", [None, 1, 3, 100])
def test_packed(window):
    lengths = [4, 1, 6]
    q, k, v = (torch.randn(sum(lengths), h, 8, dtype=torch.float64) for h in (4, 2, 2))
    context = PackedContext.from_lengths(lengths)
    actual = flash.packed_attention(q, k, v, context, scale=SCALE, window=window)
    expected = attend_packed(q, k, v, lengths, scale=SCALE, window=window)
    torch.testing.assert_close(actual, expected)


@table("window", [None, 3])
@table("query_lens, key_lens", [([4, 7], [4, 7]), ([3, 1, 5], [11, 6, 5])])
def test_prefill(query_lens, key_lens, window):
    pages = Pages(query_lens, key_lens, dtype=torch.float64)
    context = pages.context
    reference.write_kv(pages.k, pages.v, pages.kv_cache, context.slot_mapping)
    actual = flash.prefill_attention(
        pages.q, pages.k, pages.v, pages.kv_cache, context, scale=SCALE, window=window
    )
    torch.testing.assert_close(actual, pages.expected(scale=SCALE, window=window))


def test_the_layers_of_a_prefill_step_find_their_stored_keys_once(monkeypatch):
    pages = Pages([3, 1, 5], [11, 6, 5], dtype=torch.float64)
    context, found = pages.context, []
    borders_of = flash.borders_of
    monkeypatch.setattr(flash, "borders_of", lambda *x: found.append(x) or borders_of(*x))
    for layer in range(3):  # each has keys and values of its own
        k, v, kv_cache = (x + layer for x in (pages.k, pages.v, pages.kv_cache))
        reference.write_kv(k, v, kv_cache, context.slot_mapping)
        actual = flash.prefill_attention(pages.q, k, v, kv_cache, context, scale=SCALE, window=None)
        expected = reference.paged_attention(pages.q, kv_cache, context, scale=SCALE)
        torch.testing.assert_close(actual, expected)
    assert len(found) == 1


def test_prefill_dequantises_the_prefix():
    pages = Pages([3, 1, 5], [11, 6, 5], fp8=True)
    scales = pages.scales
    reference.write_kv(pages.k, pages.v, pages.kv_cache, pages.context.slot_mapping, scales)
    actual = flash.prefill_attention(
        pages.q,
        pages.k,
        pages.v,
        pages.kv_cache,
        pages.context,
        scale=SCALE,
        scales=scales,
        window=None,
    )
    torch.testing.assert_close(actual, pages.expected(scale=SCALE), rtol=1e-5, atol=1e-6)
