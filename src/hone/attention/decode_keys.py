"""Attention of a tile of queries to a run of paged keys, which are read once. This module imports
triton; `hone.attention.triton_decode` imports it."""
# Numbers become tensors in a kernel, and constexpr parameters are what they hold; names are bound
# under one constexpr condition and used under the same.
# pyright: reportReturnType=false, reportPossiblyUnboundVariable=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportUnnecessaryComparison=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: PLR0912, PLR0915, PLR0917

from __future__ import annotations

import os

import triton
import triton.language as tl

__all__ = ["attend", "nothing"]

LOG2_E = tl.constexpr(1.4426950408889634)
IS_COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")


@triton.jit
def nothing(ROWS: tl.constexpr, S: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The running softmax over no keys: largest score, sum of weights, weighted sum of values."""
    BLOCK_D: tl.constexpr = S.block_dim
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    return maximum, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, BLOCK_D], tl.float32)


@triton.jit
def attend(
    queries: tl.tuple,
    keys: tl.tuple,
    table_ptr: tl.tensor,
    rows: tl.tuple,
    start: tl.tensor,
    stop: tl.tensor,
    scale: tl.tensor,
    ROWS: tl.constexpr,
    S: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Keys start .. stop - 1 of one block table for ROWS rows: the query of a sequence (-1: none)
    with its head number `head` of those that share the key head.

    Returns the largest score, the sum of weights and the weighted sum of values of those keys that
    a query sees.
    """
    q_ptr, q_token_stride, q_head_stride, context_lens_ptr = queries
    keys_ptr, values_offset = keys
    sequence, head, kv_head = rows
    BLOCK_D: tl.constexpr = S.block_dim
    dim, column = tl.arange(0, BLOCK_D), tl.arange(0, S.tile)
    exists, dim_mask = sequence >= 0, dim < S.head_dim
    limit = tl.load(context_lens_ptr + sequence, mask=exists, other=0)
    q_row = sequence.to(tl.int64) * q_token_stride
    q_row += (kv_head * S.heads_per_key + head) * q_head_stride
    q = tl.load(
        q_ptr + q_row[:, None] + dim[None, :],
        mask=exists[:, None] & dim_mask[None, :],
        other=0.0,
    )
    factor = tl.zeros([ROWS], tl.float32) + scale
    if S.is_fp8:
        # FP8 converts to float16 in one instruction, to bfloat16 only through float32. The query is
        # scaled into the range of float16.
        largest = tl.max(tl.abs(q.to(tl.float32)), 1)
        largest = tl.where(largest == 0, 1.0, largest)
        q = (q.to(tl.float32) / largest[:, None]).to(tl.float16)
        factor *= largest
    if S.softcap == 0:
        factor *= LOG2_E

    maximum, total, weighted = nothing(ROWS, S)
    if S.is_fp8:
        # The transposing loads of the matrix units take 16-bit numbers: values are read in pairs.
        pair = tl.arange(0, BLOCK_D // 2)
        pair_mask = pair < S.head_dim // 2
        pairs_ptr = (keys_ptr + values_offset).to(tl.pointer_type(tl.int16))
        even = tl.zeros([ROWS, BLOCK_D // 2], tl.float32)
        odd = tl.zeros([ROWS, BLOCK_D // 2], tl.float32)
    for tile in range(start, stop, S.tile):
        position = tile + column
        valid = position < stop
        page = tl.load(table_ptr + position // S.page, mask=valid, other=0)
        slot = (page.to(tl.int64) * S.page + position % S.page) * S.num_kv_heads
        key_mask = valid[:, None]
        if S.head_dim < BLOCK_D:
            key_mask &= dim_mask[None, :]
        k = tl.load(keys_ptr + slot[:, None] * S.head_dim + dim[None, :], mask=key_mask, other=0.0)
        if S.is_fp8:
            key_mask = valid[:, None]
            if S.head_dim < BLOCK_D:
                key_mask &= pair_mask[None, :]
            pairs = tl.load(
                pairs_ptr + slot[:, None] * (S.head_dim // 2) + pair[None, :],
                mask=key_mask,
                other=0,
            )
            k = k.to(tl.float16)
        else:
            v = tl.load(
                keys_ptr + values_offset + slot[:, None] * S.head_dim + dim[None, :],
                mask=key_mask,
                other=0.0,
            )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * factor[:, None]
        if S.softcap > 0:
            scores = (2 * tl.sigmoid(2 * scores / S.softcap) - 1) * (S.softcap * LOG2_E)  # tanh
        visible = (position[None, :] < limit[:, None]) & valid[None, :]
        if S.window > 0:
            visible &= position[None, :] >= limit[:, None] - S.window
        scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # A query that has seen nothing yet has no finite maximum.
        finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(maximum - finite)
        total = total * shrink + tl.sum(weights, 1)
        if S.is_fp8:
            low, high = _unpack_fp8(pairs)
            weights = weights.to(tl.float16)
            even = tl.dot(weights, low, even * shrink[:, None])
            odd = tl.dot(weights, high, odd * shrink[:, None])
        else:
            weighted = weighted * shrink[:, None]
            weighted += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        maximum = new_maximum
    if S.is_fp8:
        weighted = tl.reshape(tl.join(even, odd), [ROWS, BLOCK_D])
    return maximum, total, weighted


@triton.jit
def _unpack_fp8(pairs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Lower and upper bytes of int16, e4m3 numbers both, as float16."""
    if IS_COMPILED:
        # Two pairs lie in a register; the plain code below would take them apart one by one.
        low, high = tl.inline_asm_elementwise(
            """
            {
                .reg .b16 first, second;
                .reg .b32 x, y;
                mov.b32 {first, second}, $2;
                cvt.rn.f16x2.e4m3x2 x, first;
                cvt.rn.f16x2.e4m3x2 y, second;
                prmt.b32 $0, x, y, 0x5410;
                prmt.b32 $1, x, y, 0x7632;
            }
            """,
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low = pairs.to(tl.uint8, bitcast=False).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        high = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return low, high
