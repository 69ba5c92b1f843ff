"""Attention in plain torch: used on CPUs, and the reference of the CUDA kernels.

Small sequences are cheap to compute but expensive to launch, so sequences are padded *at their end*
into few batches. Causality hides a sequence's padding from all its real tokens, hence no mask is
needed and no sample can see another.

Letters: T packed tokens, B sequences, L tokens of one, H heads, D head size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.attention.context import FP8_DTYPE, PagedContext

__all__ = ["gather_kv", "packed_attention", "paged_attention", "span_attention", "write_kv"]

MAX_PADDING = 1.15
"""Sequences share a batch while the longest has at most this many times the shortest's tokens.
Measured on one CPU core, forward and backward of 64 sequences of 30 to 60 tokens, 4 heads of 32:
11 ms, against 15 ms one sequence at a time and 13 ms in a single batch."""


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    key_lengths: tuple[int, ...] | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention within each packed sequence, differentiable.

    q is [T, Hq, D], `lengths` sums to T, k and v are [K, Hkv, D] of `key_lengths`; None: of the
    same tokens. The queries of a sequence are its last tokens. With `window` w a token sees
    itself and the w - 1 before it; with `softcap` c a score s becomes c * tanh(s / c). Returns
    [T, Hq, D].
    """
    query_rows, key_rows, groups = _padded_layout(lengths, key_lengths or lengths, q.device)
    sizes = [count * length for count, length in groups]
    q_rows, k_rows, v_rows = (
        x.new_zeros(sum(sizes), *x.shape[1:]).index_copy(0, rows, x).split(sizes)
        for x, rows in ((q, query_rows), (k, key_rows), (v, key_rows))
    )
    outputs: list[Tensor] = []
    for group, *qkv in zip(groups, q_rows, k_rows, v_rows, strict=True):
        q_g, k_g, v_g = (x.unflatten(0, group).transpose(1, 2) for x in qkv)  # [B, H, L, D]
        bias = None
        if softcap is not None or (window is not None and window < group[1]):
            positions = torch.arange(group[1], device=q.device)
            bias = _bias(positions, positions, window, q.dtype)
        output = _attend(q_g, k_g, v_g, bias, scale=scale, softcap=softcap)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, query_rows)


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    context: PagedContext,
    scales: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of each sequence's newest tokens against all its keys in the cache.

    q is [T, Hq, D], kv_cache [2, num_blocks, block_size, Hkv, D] with the keys of q's own tokens
    already written, scales [2, Hkv] those of an FP8 cache. Sequences with equally many queries are
    computed together; a decode step is a single batch, and reads a shared prefix once for each
    member. Returns [T, Hq, D].
    """
    block_size = kv_cache.shape[2]
    if context.is_decode:
        num_blocks = -(-context.max_context_len // block_size)
        tables = context.block_tables[:, :num_blocks]
        bias = context.biases.get(window)
        if bias is None:
            num_keys = num_blocks * block_size
            bias = _bias_of_newest(context.context_lens, 1, num_keys, window, q.dtype)
            context.biases[window] = bias
        output = _attend_blocks(
            q.unsqueeze(1), kv_cache, tables, bias, scale=scale, scales=scales, softcap=softcap
        )
        return output.squeeze(1)
    output = torch.empty_like(q)
    for members, sequences, tokens in _query_groups(context.query_lens, q.device):
        queries = q.index_select(0, tokens).unflatten(0, (len(members), -1))
        num_blocks = -(-max(context.key_lens[i] for i in members) // block_size)
        tables = context.block_tables[:, :num_blocks].index_select(0, sequences)
        lens = context.context_lens.index_select(0, sequences)
        num_keys = num_blocks * block_size
        bias = _bias_of_newest(lens, queries.shape[1], num_keys, window, q.dtype)
        attended = _attend_blocks(
            queries, kv_cache, tables, bias, scale=scale, scales=scales, softcap=softcap
        )
        output.index_copy_(0, tokens, attended.flatten(0, 1))
    return output


def span_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    key_lengths: tuple[int, ...],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of spans to all their keys, differentiable.

    q is [Q, Hq, D], `lengths` sums to Q, k and v are [K, Hkv, D] of `key_lengths`. The queries of a
    span are its last tokens; a window hides earlier keys from them as it does in
    `packed_attention`. Returns [Q, Hq, D].
    """
    outputs: list[Tensor] = []
    # One at a time: a pass has few images.
    parts = zip(q.split(lengths), k.split(key_lengths), v.split(key_lengths), strict=True)
    for qkv in parts:
        keys = torch.arange(len(qkv[1]), device=q.device)
        bias = _bias(keys[-len(qkv[0]) :], keys, window, q.dtype, is_causal=False)
        q_s, k_s, v_s = (x.transpose(0, 1).unsqueeze(0) for x in qkv)  # [1, H, L, D]
        output = _attend(q_s, k_s, v_s, bias, scale=scale, softcap=softcap)
        outputs.append(output.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


def write_kv(
    k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, scales: Tensor | None = None
) -> None:
    """Store k and v, [T, Hkv, D], at slots [T] of kv_cache; slot -1 stores nothing.

    With `scales` [2, Hkv] the cache is FP8: values are divided by their head's scale, and
    saturate.
    """
    if bool((slot_mapping < 0).any()):
        written = (slot_mapping >= 0).nonzero().squeeze(1)
        k, v, slot_mapping = (x.index_select(0, written) for x in (k, v, slot_mapping))
    if scales is not None:
        k, v = (_quantise(x, s) for x, s in zip((k, v), scales, strict=True))
        kv_cache = kv_cache.view(torch.uint8)
    slots = kv_cache.view(2, -1, *kv_cache.shape[3:])
    slots[0].index_copy_(0, slot_mapping, k)
    slots[1].index_copy_(0, slot_mapping, v)


def gather_kv(
    kv_cache: Tensor, dim: int, indices: Tensor, scales: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`kv_cache.index_select(dim, indices)`, [2, ..., Hkv, D], dequantised to `dtype` if FP8."""
    if scales is None:
        return kv_cache.index_select(dim, indices)
    stored = kv_cache.view(torch.uint8).index_select(dim, indices).view(FP8_DTYPE)
    scales = scales.view(2, *(1,) * (kv_cache.dim() - 3), -1, 1)
    return (stored.float() * scales).to(dtype)


def _quantise(x: Tensor, scales: Tensor) -> Tensor:
    """x [T, H, D] over scales [H] as the bytes of FP8 numbers."""
    limit = torch.finfo(FP8_DTYPE).max
    scaled = (x.float() / scales.unsqueeze(1)).clamp(-limit, limit)
    return scaled.to(FP8_DTYPE).view(torch.uint8)


@lru_cache(maxsize=16)
def _padded_layout(
    query_lengths: tuple[int, ...], lengths: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
    """Layout of sequences in batches (count, length), each padded to its longest, and the rows [T]
    and [K] of each packed query and key. The same for all layers of a forward, hence the cache."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches: list[list[int]] = []
    for i in order:
        if not batches or lengths[batches[-1][0]] > MAX_PADDING * lengths[i]:
            batches.append([])
        batches[-1].append(i)
    first_row = [0] * len(lengths)
    num_rows = 0
    for batch in batches:
        for i in batch:
            first_row[i] = num_rows
            num_rows += lengths[batch[0]]
    groups = [(len(batch), lengths[batch[0]]) for batch in batches]
    keys = _ranges(first_row, lengths, device)
    if query_lengths == lengths:
        return keys, keys, groups
    first_query = [
        row + length - queries
        for row, length, queries in zip(first_row, lengths, query_lengths, strict=True)
    ]
    return _ranges(first_query, query_lengths, device), keys, groups


@lru_cache(maxsize=16)
def _query_groups(
    query_lens: tuple[int, ...], device: torch.device
) -> list[tuple[list[int], Tensor, Tensor]]:
    """Groups of sequences with equally many queries: their indices, as list and tensor, and their
    queries [B * L] in the packed row, int64."""
    members: defaultdict[int, list[int]] = defaultdict(list)
    for i, length in enumerate(query_lens):
        members[length].append(i)
    starts = [0, *accumulate(query_lens)]
    return [
        (
            group,
            torch.tensor(group, device=device),
            _ranges([starts[i] for i in group], [length] * len(group), device),
        )
        for length, group in members.items()
    ]


def _ranges(starts: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tensor:
    """The numbers start .. start + length - 1 of each pair, one after the other, int64."""
    # A tensor created in inference mode could not be saved for a later backward.
    with torch.inference_mode(False):
        return torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]).to(
            device
        )


def _attend_blocks(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    bias: Tensor,
    *,
    scale: float,
    scales: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Attention of the last L tokens of each sequence, q [B, L, Hq, D], to its blocks: [B, L, Hq,
    D]."""
    kv = gather_kv(kv_cache, 1, block_tables.reshape(-1), scales, q.dtype)
    k, v = kv.view(2, len(q), -1, *kv_cache.shape[3:]).transpose(2, 3).unbind(0)  # [B, Hkv, K, D]
    output = _attend(q.transpose(1, 2), k, v, bias, scale=scale, softcap=softcap)
    return output.transpose(1, 2)


def _bias_of_newest(
    context_lens: Tensor, num_queries: int, num_keys: int, window: int | None, dtype: torch.dtype
) -> Tensor:
    """`_bias` of the last L tokens of each sequence for its first K keys, [B, 1, L, K]."""
    keys = torch.arange(num_keys, device=context_lens.device)
    newest = torch.arange(-num_queries, 0, device=context_lens.device)
    return _bias(context_lens.unsqueeze(1) + newest, keys, window, dtype).unsqueeze(1)


def _bias(
    queries: Tensor,
    keys: Tensor,
    window: int | None,
    dtype: torch.dtype,
    *,
    is_causal: bool = True,
) -> Tensor:
    """Bias added to the scores of queries [..., L] and keys [K], given by position: 0 where the
    query sees the key, else -inf; [..., L, K]."""
    distance = queries.unsqueeze(-1) - keys
    hidden = distance < 0 if is_causal else torch.zeros_like(distance, dtype=torch.bool)
    if window is not None:
        hidden |= distance >= window
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Attention of q [B, Hq, L, D] to k and v [B, Hkv, K, D]. `bias` None is causal with L = K."""
    num_kv_heads, num_queries = k.shape[1], q.shape[2]
    if softcap is None and (bias is None or num_queries > 1):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=bias is None, scale=scale, enable_gqa=True
        )
    # Queries that share a key head are in one matrix, so that keys are read once and never copied.
    grouped = q.unflatten(1, (num_kv_heads, -1)).flatten(2, 3)  # [B, Hkv, G * L, D]
    if softcap is None:
        output = F.scaled_dot_product_attention(grouped, k, v, attn_mask=bias, scale=scale)
        return output.flatten(1, 2).unsqueeze(2)
    assert bias is not None
    exact = torch.promote_types(q.dtype, torch.float32)
    scores = grouped.to(exact) @ k.to(exact).transpose(2, 3)
    scores = ((scores * (scale / softcap)).tanh() * softcap).unflatten(
        2, (-1, num_queries)
    )  # [B, Hkv, G, L, K]
    scores = scores + (bias.unsqueeze(1) if bias.dim() == 4 else bias)
    weights = scores.softmax(-1).to(v.dtype)
    return (weights.flatten(2, 3) @ v).unflatten(2, (-1, num_queries)).flatten(1, 2)
