"""Parts of a sequence's attention: each split stores its parts, and the last one merges them.

A part is the attention to some keys, normalised, with the logarithm of its sum of weights; parts
are merged by weighing them with these (https://pytorch.org/blog/flash-decoding/). `softmax` is a
running softmax: largest score [ROWS], sum of weights [ROWS], weighted sum of values [ROWS, D].

Who comes last may differ from launch to launch, the result may not. So parts are added one at a
time in one order, a split's own ones as if they had been stored, and the kernel is built without
contraction of products and sums (`enable_fp_fusion`), which would be another one in each of the
places that merge.

This module imports triton; `hone.attention.triton_decode` imports it.
"""
# Numbers become tensors in a kernel, and constexpr parameters are what they hold.
# pyright: reportReturnType=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false
# ruff: noqa: PLR0917

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "add_own_parts",
    "add_part",
    "add_parts",
    "add_shared_parts",
    "of_row",
    "part_of",
    "store_output",
    "store_part",
]


@triton.constexpr_function
def _parts_at_once(rows: int) -> int:
    """Number of parts that are loaded at the same time; the sums do not depend on it."""
    return max(1, 16 // rows)


@triton.jit
def of_row(values: tl.tensor, member: tl.tensor, row_member: tl.tensor) -> tl.tensor:
    """The value of each row's member."""
    return tl.sum(tl.where(member[None, :] == row_member[:, None], values[None, :], 0), 1)


@triton.jit
def store_part(
    parts: tl.tuple, part: tl.tensor, mask: tl.tensor, softmax: tl.tuple, S: tl.constexpr
) -> None:
    """Store the running softmax of rows as their part number `part` [ROWS]."""
    partial_ptr, log_sums_ptr = parts
    dim = tl.arange(0, S.block_dim)
    log_sum, values = part_of(softmax)
    tl.store(log_sums_ptr + part, log_sum, mask=mask)
    tl.store(
        partial_ptr + part[:, None] * S.head_dim + dim[None, :],
        values,
        mask=mask[:, None] & (dim < S.head_dim)[None, :],
    )


@triton.jit
def part_of(softmax: tl.tuple) -> tuple[tl.tensor, tl.tensor]:
    """Logarithm of the sum of weights [ROWS] and values [ROWS, D]; -inf and 0 without any key."""
    maximum, total, weighted = softmax
    empty = total == 0
    divisor = tl.where(empty, 1.0, total)
    log_sum = tl.where(empty, float("-inf"), maximum + tl.log2(divisor))
    return log_sum, weighted / divisor[:, None]


@triton.jit
def add_part(
    log_sum: tl.tensor, values: tl.tensor, softmax: tl.tuple
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add one part to a running softmax; a part without keys changes nothing."""
    maximum, total, weighted = softmax
    new_maximum = tl.maximum(maximum, log_sum)
    finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weight, shrink = tl.exp2(log_sum - finite), tl.exp2(maximum - finite)
    weighted = weighted * shrink[:, None] + values * weight[:, None]
    return new_maximum, total * shrink + weight, weighted


@triton.jit
def store_output(output_ptr: tl.tensor, rows: tl.tuple, softmax: tl.tuple, S: tl.constexpr) -> None:
    """Write the rows of sequences (-1: none) into the output [B, Hq, D]."""
    sequence, head, kv_head = rows
    _, total, weighted = softmax
    dim = tl.arange(0, S.block_dim)
    target = (sequence.to(tl.int64) * S.num_kv_heads + kv_head) * S.heads_per_key + head
    tl.store(
        output_ptr + target[:, None] * S.head_dim + dim[None, :],
        weighted / tl.where(total == 0, 1.0, total)[:, None],
        mask=(sequence >= 0)[:, None] & (dim < S.head_dim)[None, :],
    )


@triton.jit
def add_own_parts(
    parts: tl.tuple,
    rows: tl.tuple,
    before: tl.tensor,
    own_tiles: tl.tensor,
    split_tiles: tl.tensor,
    softmax: tl.tuple,
    ROWS: tl.constexpr,
    S: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add the parts of what a row's sequence (-1: none) reads alone.

    Split l keeps its part of sequence s in slot s + l: as splits and sequences both run upwards, no
    two parts meet, and those of one sequence lie side by side. Groups have slots of their own.
    """
    sequence, head, kv_head = rows
    first = before // split_tiles
    count = (before + own_tiles - 1) // split_tiles - first + 1
    slot = (sequence + first).to(tl.int64) * S.num_kv_heads + kv_head
    first_part = slot * S.heads_per_key + head
    stride = S.num_kv_heads * S.heads_per_key
    count = tl.where(sequence >= 0, count, 0)
    return add_parts(parts, first_part, stride, count, softmax, ROWS, S)


@triton.jit
def add_shared_parts(
    parts: tl.tuple,
    shared_partial: tl.tensor,
    places_ptr: tl.tensor,
    counter: tl.tensor,
    head: tl.tensor,
    softmax: tl.tuple,
    ROWS: tl.constexpr,
    S: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add the part that the sequence's group has computed."""
    place = tl.load(places_ptr + 2 * counter, cache_modifier=".cg").to(tl.int64)
    count = tl.load(places_ptr + 2 * counter + 1, cache_modifier=".cg")
    first_part = shared_partial + place * S.heads_per_key + head
    stride = S.num_kv_heads * S.members * S.heads_per_key
    count = tl.where(head < S.heads_per_key, count, 0)
    return add_parts(parts, first_part, stride, count, softmax, ROWS, S)


@triton.jit
def add_parts(
    parts: tl.tuple,
    first: tl.tensor,
    stride: tl.tensor,
    count: tl.tensor,
    softmax: tl.tuple,
    ROWS: tl.constexpr,
    S: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add `count` [ROWS] parts, the first at `first` [ROWS]."""
    partial_ptr, log_sums_ptr = parts
    maximum, total, weighted = softmax
    PARTS: tl.constexpr = _parts_at_once(ROWS)
    dim = tl.arange(0, S.block_dim)
    for base in range(0, tl.max(count, 0), PARTS):
        for offset in tl.static_range(PARTS):
            part = first + (base + offset) * stride
            mask = base + offset < count
            # Other multiprocessors wrote the parts: they are read past this one's own cache.
            log_sum = tl.load(
                log_sums_ptr + part, mask=mask, other=float("-inf"), cache_modifier=".cg"
            )
            values = tl.load(
                partial_ptr + part[:, None] * S.head_dim + dim[None, :],
                mask=mask[:, None] & (dim < S.head_dim)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            maximum, total, weighted = add_part(log_sum, values, (maximum, total, weighted))
    return maximum, total, weighted
