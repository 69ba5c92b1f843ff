"""Triton kernels of generation: storing keys and values in pages, and decoding from them.

Decode reads each sequence's keys and values once and little else, so it is bound by memory. One
program serves one sequence, one key head and one split of the keys; the query heads that share the
key head fill a tile of at least 16 rows, the smallest that the matrix units take. Splits
(flash-decoding, https://pytorch.org/blog/flash-decoding/) keep the device busy when sequences are
few; a second kernel merges them by their log-sum-exp. Softmax runs in float32 and base 2.

This module imports triton; `hone.attention.backends` imports it only where it is used.
"""
# A launch passes plain numbers for constexpr parameters and takes `num_warps`, which the types of
# triton do not know; kernels take their pointers by position.
# pyright: reportArgumentType=false, reportCallIssue=false
# ruff: noqa: PLR0917

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["decode_attention", "write_kv"]

LOG2_E = tl.constexpr(1.4426950408889634)
MIN_DOT_ROWS = 16
KEYS_PER_TILE = 64
PROGRAMS_PER_DEVICE = 1024
"""Programs that fill the largest GPU (132 multiprocessors, several programs each)."""
MAX_SPLITS = 64


def write_kv(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store k and v, [T, Hkv, D], at slots [T] of kv_cache; slot -1 stores nothing.

    kv_cache is [2, num_blocks, block_size, Hkv, D], contiguous. One kernel, no host wait.
    """
    num_tokens, num_heads, head_dim = k.shape
    assert kv_cache.is_contiguous()
    assert k.stride(2) == v.stride(2) == 1, f"{k.stride()=} {v.stride()=}"
    _write_kernel[(num_tokens,)](
        k,
        v,
        kv_cache,
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        kv_cache.stride(0),
        HEAD_DIM=head_dim,
        WIDTH=num_heads * head_dim,
        BLOCK=triton.next_power_of_2(num_heads * head_dim),
    )


def decode_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    max_context_len: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """One query a sequence, q [B, Hq, D], against its paged keys; returns [B, Hq, D].

    kv_cache is [2, num_blocks, block_size, Hkv, D], block_tables [B, max_blocks] and context_lens
    [B] are int32. Launches depend on shapes and `max_context_len` only, so a captured graph
    can be replayed with other lengths up to it. A sequence of length 0 gives zeros.
    """
    batch, num_heads, head_dim = q.shape
    num_kv_heads = kv_cache.shape[3]
    assert q.is_contiguous()
    assert kv_cache.is_contiguous()
    assert block_tables.stride(1) == 1, f"{block_tables.stride()=}"
    keys = min(max_context_len, window) if window else max_context_len
    splits = num_splits or _num_splits(batch * num_kv_heads, keys)
    output = torch.empty_like(q)
    shape = (batch, num_heads, splits)
    partial = q.new_empty((*shape, head_dim) if splits > 1 else (0,), dtype=torch.float32)
    log_sums = q.new_empty(shape if splits > 1 else (0,), dtype=torch.float32)
    block_dim = triton.next_power_of_2(head_dim)
    _decode_kernel[(batch, num_kv_heads, splits)](
        output,
        partial,
        log_sums,
        q,
        kv_cache,
        block_tables,
        context_lens,
        scale,
        block_tables.stride(0),
        kv_cache.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE=kv_cache.shape[2],
        SPLITS=splits,
        WINDOW=window or 0,
        SOFTCAP=softcap or 0.0,
        ROWS=max(MIN_DOT_ROWS, triton.next_power_of_2(num_heads // num_kv_heads)),
        BLOCK_D=max(MIN_DOT_ROWS, block_dim),
        TILE=KEYS_PER_TILE if head_dim <= 128 else KEYS_PER_TILE // 2,
        num_warps=4,
        num_stages=2,
    )
    if splits > 1:
        _merge_kernel[(batch, num_heads)](
            output, partial, log_sums, HEAD_DIM=head_dim, SPLITS=splits, BLOCK_D=block_dim
        )
    return output


def _num_splits(num_programs: int, num_keys: int) -> int:
    """A power of two: enough programs for the device, at least four tiles of keys each."""
    wanted = min(MAX_SPLITS, PROGRAMS_PER_DEVICE // num_programs, num_keys // (4 * KEYS_PER_TILE))
    return 1 << max(0, wanted.bit_length() - 1)


@triton.jit
def _write_kernel(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    values_offset: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        offset = tl.arange(0, BLOCK)
        mask = offset < WIDTH
        head, dim = offset // HEAD_DIM, offset % HEAD_DIM
        k = tl.load(k_ptr + token * k_token_stride + head * k_head_stride + dim, mask=mask)
        v = tl.load(v_ptr + token * v_token_stride + head * v_head_stride + dim, mask=mask)
        target = cache_ptr + slot * WIDTH + offset
        tl.store(target, k, mask=mask)
        tl.store(target + values_offset, v, mask=mask)


@triton.jit
def _decode_kernel(
    output_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    q_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    scale: tl.tensor,
    table_stride: tl.tensor,
    values_offset: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, dim, column = tl.arange(0, ROWS), tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    head = kv_head * GROUP + row
    query_row = sequence.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head
    row_mask, dim_mask = row < GROUP, dim < HEAD_DIM
    tile_mask = row_mask[:, None] & dim_mask[None, :]
    q = tl.load(q_ptr + query_row[:, None] * HEAD_DIM + dim[None, :], mask=tile_mask, other=0.0)

    length = tl.load(context_lens_ptr + sequence)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    tiles = tl.cdiv(length - first, TILE)
    start = first + split * tl.cdiv(tiles, SPLITS) * TILE
    stop = tl.minimum(start + tl.cdiv(tiles, SPLITS) * TILE, length)

    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for tile in range(start, stop, TILE):
        position = tile + column
        valid = position < stop
        page = tl.load(
            block_tables_ptr + sequence.to(tl.int64) * table_stride + position // PAGE,
            mask=valid,
            other=0,
        )
        slot = page.to(tl.int64) * PAGE + position % PAGE
        address = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dim[None, :]
        key_mask = valid[:, None] & dim_mask[None, :]
        k = tl.load(cache_ptr + address, mask=key_mask, other=0.0)
        v = tl.load(cache_ptr + values_offset + address, mask=key_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP > 0:
            scores = (2 * tl.sigmoid(2 * scores / SOFTCAP) - 1) * SOFTCAP  # tanh
        scores = tl.where(valid[None, :], scores * LOG2_E, float("-inf"))
        # Every tile holds a valid key, so the maximum is finite from the first one on.
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        shrink = tl.exp2(maximum - new_maximum)
        total = total * shrink + tl.sum(weights, 1)
        weighted = weighted * shrink[:, None]
        weighted += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        maximum = new_maximum

    empty = total == 0
    weighted = weighted / tl.where(empty, 1.0, total)[:, None]
    if SPLITS == 1:
        target = output_ptr + query_row[:, None] * HEAD_DIM + dim[None, :]
        tl.store(target, weighted, mask=tile_mask)
    else:
        part = query_row * SPLITS + split
        tl.store(partial_ptr + part[:, None] * HEAD_DIM + dim[None, :], weighted, mask=tile_mask)
        log_sum = tl.where(empty, float("-inf"), maximum + tl.log2(tl.where(empty, 1.0, total)))
        tl.store(log_sums_ptr + part, log_sum, mask=row_mask)


@triton.jit
def _merge_kernel(
    output_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    query_row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    log_sums = tl.load(log_sums_ptr + query_row * SPLITS + split)
    maximum = tl.max(log_sums, 0)
    # A sequence of length 0 has no finite log-sum; its parts are zeros of weight 1.
    maximum = tl.where(maximum == float("-inf"), 0.0, maximum)
    weights = tl.exp2(log_sums - maximum)
    total = tl.sum(weights, 0)
    address = (query_row * SPLITS + split)[:, None] * HEAD_DIM + dim[None, :]
    mask = dim < HEAD_DIM
    parts = tl.load(partial_ptr + address, mask=mask[None, :], other=0.0)
    merged = tl.sum(parts * weights[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(output_ptr + query_row * HEAD_DIM + dim, merged, mask=mask)
