"""Attention whose result for a query is the same bits in training, prefill and decode.

A query's output is a sum over its keys, and a sum of floats depends on its order. Here that order
is a function of the positions alone, however queries are batched, chunked or packed and wherever
the keys lie (cf. https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/):

* Keys are taken in tiles of `KEYS_PER_TILE`, aligned to position 0, by an online softmax; tiles add
  up to splits of `KEYS_PER_SPLIT` positions, and splits are folded from the first to the last. One
  program folds them as it goes, or several compute a split each and a second kernel folds them.
* A row of a tile is one query of one head. Rows never mix, so a decode step pads a tile of 16 rows
  and prefill fills one of 128. Keys that a row may not see get weight 0, which changes no bit.
* Row sums are taken by the matrix unit, as a product with ones: the order of a reduction across
  threads would depend on the shape of the tile. Where a compiler could contract a product and a sum
  in one kernel and not in another, the code says which it is (`fma`).

One assumption remains: the matrix unit adds 16 products at a time in the same way in every tile
shape. `benchmarks/gpu/exact_check.py` proves it on a device.

Letters: T packed query tokens, S sequences. This module imports triton; import it only where it is
used.
"""
# A launch passes plain numbers for constexpr parameters and takes `num_warps`, which the types of
# triton do not know; kernels take their pointers by position and are long.
# pyright: reportArgumentType=false, reportCallIssue=false
# ruff: noqa: PLR0915, PLR0917

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.attention import flash
from hone.attention.blocks import AttentionBlock
from hone.attention.context import PackedContext, PagedContext
from hone.families.model_facts import EXACT_HEAD_DIMS

__all__ = ["RowTile", "packed_attention", "paged_attention"]

KEYS_PER_TILE = 64
KEYS_PER_SPLIT = 1024
ROWS_PER_DEVICE = 16384
"""Rows that fill the largest GPU (132 multiprocessors): 128 programs of 128, or 1,024 of 16."""

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)
SUM_COLUMNS = tl.constexpr(16)
"""Columns of the matrix of ones for row sums, the fewest that a product takes."""


class RowTile(NamedTuple):
    """Rows, warps and pipeline stages of a program. They change the time, never the result."""

    rows: int
    num_warps: int
    num_stages: int


DECODE_TILE = RowTile(16, 2, 3)
SHORT_PREFILL_TILE = RowTile(64, 4, 2)
PREFILL_TILE = RowTile(128, 8, 3)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, context: PackedContext, *, scale: float, window: int | None
) -> Tensor:
    """Causal attention within each packed sequence, differentiable.

    q is [T, Hq, D], k and v [T, Hkv, D], bfloat16 or float16 with D in `EXACT_HEAD_DIMS`. Returns
    [T, Hq, D]. The gradient is FlashAttention's, from this output and its log-sum-exp.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return _PackedAttention.apply(q, k, v, context, scale, window)
    return _attend_packed(q, k, v, context, scale=scale, window=window)[0]


class _PackedAttention(torch.autograd.Function):
    """`_attend_packed`, differentiated by FlashAttention."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: PackedContext,
        scale: float,
        window: int | None,
    ) -> Tensor:
        output, log_sums = _attend_packed(q, k, v, context, scale=scale, window=window)
        ctx.save_for_backward(q, k, v, output, log_sums)
        ctx.context, ctx.scale, ctx.window = context, scale, window
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, log_sums = ctx.saved_tensors
        context: PackedContext = ctx.context
        window: int | None = ctx.window
        left = -1 if window is None or window >= context.max_seqlen else window - 1
        row = AttentionBlock(
            queries=slice(None),
            keys=slice(None),
            query_lens=context.lengths,
            key_lens=context.lengths,
            window=(left, 0),
            borders_q=context.cu_seqlens,
            borders_k=context.cu_seqlens,
        )
        grad_qkv = flash.block_gradients(
            grads[0].contiguous(), q, k, v, row, output=output, lse=log_sums, scale=ctx.scale
        )
        return (*grad_qkv, None, None, None)


def _attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: PackedContext,
    *,
    scale: float,
    window: int | None,
    tile: RowTile = PREFILL_TILE,
    keys_per_tile: int = KEYS_PER_TILE,
    keys_per_split: int = KEYS_PER_SPLIT,
) -> tuple[Tensor, Tensor]:
    """The output [T, Hq, D] and the natural log-sum-exp of the scores, float32 [Hq, T].

    The order of additions follows from `keys_per_tile` and `keys_per_split`, so other values give
    other bits. `tile` changes only the time.
    """
    (num_tokens, num_heads, _), num_kv_heads = q.shape, k.shape[1]
    group = num_heads // num_kv_heads
    _check_operands(q, k, v)
    rows = max(tile.rows, triton.next_power_of_2(group))
    output = q.new_empty(q.shape)
    log_sums = q.new_empty((num_heads, num_tokens), dtype=torch.float32)
    borders, num_sequences = context.cu_seqlens, len(context.lengths)
    _attend_kernel[(num_sequences * num_kv_heads, triton.cdiv(context.max_seqlen, rows // group))](
        output,
        log_sums,
        output,
        output,
        q,
        k,
        v,
        borders,
        borders,
        scale * LOG2_E,
        num_tokens,
        0,
        keys_per_split,
        *_strides(q, k, v),
        0,
        PAGE=0,
        PARALLEL=False,
        **_constants(q, k, tile, rows, keys_per_tile, window),
    )
    return output, log_sums


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    context: PagedContext,
    *,
    scale: float,
    window: int | None,
    tile: RowTile | None = None,
    keys_per_tile: int = KEYS_PER_TILE,
    keys_per_split: int = KEYS_PER_SPLIT,
    num_programs: int | None = None,
) -> Tensor:
    """Attention of each sequence's newest tokens, q [T, Hq, D], to its paged keys: [T, Hq, D].

    The cache already holds the keys and values of these tokens. kv_cache is [2, num_blocks,
    block_size, Hkv, D], contiguous, of the dtype of q. Reads tensors and the two maxima of the
    context, never its host tuples, so a captured graph can be replayed with other lengths up to the
    maxima. A sequence of length 0 gives zeros. `num_programs` programs share the splits of a tile;
    their number changes only the time, as `tile` does.
    """
    (num_tokens, num_heads, head_dim), num_kv_heads = q.shape, kv_cache.shape[3]
    group = num_heads // num_kv_heads
    k, v = kv_cache.flatten(1, 2).unbind(0)
    _check_operands(q, k, v)
    assert kv_cache.is_contiguous()
    assert context.block_tables.stride(1) == 1, f"{context.block_tables.stride()=}"
    if tile is None:
        longest = context.max_seqlen_q * group
        tiles = (t for t in (DECODE_TILE, SHORT_PREFILL_TILE) if longest <= t.rows)
        tile = next(tiles, PREFILL_TILE)
    rows = max(tile.rows, triton.next_power_of_2(group))
    num_sequences = context.block_tables.shape[0]
    num_tiles = triton.cdiv(context.max_seqlen_q, rows // group)
    num_splits = triton.cdiv(context.max_context_len, keys_per_split)
    if num_programs is None:
        num_programs = _num_programs(num_sequences * num_kv_heads * num_tiles * rows, num_splits)
    parallel = num_programs > 1
    output = q.new_empty(q.shape)
    shape = (num_tokens, num_heads, num_splits) if parallel else (0,)
    maxima, sums = q.new_empty((2, *shape), dtype=torch.float32).unbind(0)
    parts = q.new_empty((*shape, head_dim) if parallel else (0,), dtype=torch.float32)
    borders = context.cu_seqlens_q
    _attend_kernel[(num_sequences * num_kv_heads, num_tiles, num_programs)](
        parts if parallel else output,
        maxima,
        sums,
        context.block_tables,
        q,
        k,
        v,
        borders,
        context.context_lens,
        scale * LOG2_E,
        num_tokens,
        num_splits,
        keys_per_split,
        *_strides(q, k, v),
        context.block_tables.stride(0),
        PAGE=kv_cache.shape[2],
        PARALLEL=parallel,
        **_constants(q, k, tile, rows, keys_per_tile, window),
    )
    if parallel:
        _fold_kernel[(num_sequences * num_heads, context.max_seqlen_q)](
            output,
            parts,
            maxima,
            sums,
            borders,
            context.context_lens,
            num_splits,
            keys_per_split,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            WINDOW=window or 0,
            num_warps=1,
        )
    return output


def _strides(*tensors: Tensor) -> list[int]:
    """Strides of tokens and heads."""
    return [stride for tensor in tensors for stride in tensor.stride()[:2]]


def _constants(
    q: Tensor, k: Tensor, tile: RowTile, rows: int, keys_per_tile: int, window: int | None
) -> dict[str, int]:
    """Compile-time constants of the kernel, except the kind of its keys."""
    return {
        "NUM_KV_HEADS": k.shape[1],
        "GROUP": q.shape[1] // k.shape[1],
        "HEAD_DIM": q.shape[2],
        "WINDOW": window or 0,
        "ROWS": rows,
        "KEYS": keys_per_tile,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _num_programs(num_rows: int, num_splits: int) -> int:
    """Number of programs that share a tile's splits: enough to fill the device, a power of two."""
    wanted = min(num_splits, ROWS_PER_DEVICE // num_rows)
    return 1 << max(0, wanted.bit_length() - 1)


def _check_operands(q: Tensor, k: Tensor, v: Tensor) -> None:
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1, "the head dimension must be contiguous"
    assert q.dtype == k.dtype == v.dtype, f"{q.dtype=} {k.dtype=} {v.dtype=}"
    assert q.shape[2] in EXACT_HEAD_DIMS, f"heads of {q.shape[2]}, allowed: {EXACT_HEAD_DIMS}"


@triton.jit
def _attend_tiles(
    softmax: tl.tuple,
    q: tl.tensor,
    keys: tl.tuple,
    position: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Online softmax over the keys start .. stop - 1; `MASKED` where some row may not see them all.

    `softmax` is the largest score in base 2 [ROWS], the sum of weights [ROWS, SUM_COLUMNS] in equal
    columns, and the weighted sum of values [ROWS, HEAD_DIM].
    """
    maximum, total, weighted = softmax
    k_ptr, v_ptr, table_ptr, length, k_token_stride, v_token_stride = keys
    column, dim = tl.arange(0, KEYS), tl.arange(0, HEAD_DIM)
    ones = tl.full([KEYS, SUM_COLUMNS], 1.0, q.dtype)
    for tile in range(start, stop, KEYS):
        key = tile + column
        # Beyond the last key, read it again: it gets weight 0, and loads need no mask.
        row = tl.minimum(key, length - 1) if MASKED else key
        if PAGE > 0:
            page = tl.load(table_ptr + row // PAGE).to(tl.int64)
            row = page * PAGE + row % PAGE
        else:
            row = row.to(tl.int64)
        k = tl.load(k_ptr + row[:, None] * k_token_stride + dim[None, :])
        v = tl.load(v_ptr + row[:, None] * v_token_stride + dim[None, :])
        scores = tl.dot(q, tl.trans(k))
        if MASKED:
            visible = key[None, :] <= position[:, None]
            if WINDOW > 0:
                visible = visible & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
        finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # no key seen yet
        weights = tl.exp2(tl.fma(scores, scale, -finite[:, None])).to(q.dtype)
        shrink = tl.exp2(maximum - finite)
        total = tl.dot(weights, ones, total * shrink[:, None])
        weighted = tl.dot(weights, v, weighted * shrink[:, None])
        maximum = new_maximum
    return maximum, total, weighted


@triton.jit
def _fold(softmax: tl.tuple, part: tl.tuple) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add a split to the earlier ones, [ROWS] or [ROWS, D] each. An empty one adds nothing."""
    maximum, total, weighted = softmax
    part_maximum, part_total, part_weighted = part
    new_maximum = tl.maximum(maximum, part_maximum)
    finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    keep, add = tl.exp2(maximum - finite), tl.exp2(part_maximum - finite)
    total = tl.fma(total, keep, part_total * add)
    weighted = tl.fma(weighted, keep[:, None], part_weighted * add[:, None])
    return new_maximum, total, weighted


@triton.jit
def _normalise(total: tl.tensor, weighted: tl.tensor) -> tl.tensor:
    """Output of the softmax; zeros if no key was seen."""
    total = tl.where(total == 0, 1.0, total)
    # Correctly rounded division is the same everywhere; the default is an approximation.
    return tl.div_rn(weighted, tl.broadcast_to(total[:, None], weighted.shape))


@triton.jit(do_not_specialize=["num_tokens", "max_splits", "table_stride"])
def _attend_kernel(
    output_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    borders_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    scale: tl.tensor,
    num_tokens: tl.tensor,
    max_splits: tl.tensor,
    split_keys: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    table_stride: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PARALLEL: tl.constexpr,
) -> None:
    """One tile of a sequence's queries for one key head, `PAGE` 0 where the keys are packed.

    With `PARALLEL` each split is stored for `_fold_kernel`: its weighted values at `output_ptr`,
    its maxima at `log_sums_ptr`, its sums at `sums_ptr`. Without it the splits are folded into the
    output, and where keys are packed, the log-sum-exp is stored too.
    """
    QUERIES: tl.constexpr = ROWS // GROUP
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    sequence, kv_head = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    first_token = tl.load(borders_ptr + sequence)
    num_queries = tl.load(borders_ptr + sequence + 1) - first_token
    # Later queries see more keys: their tiles start first.
    first_query = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES
    if first_query >= num_queries:
        return
    if PAGE > 0:
        length = tl.load(lengths_ptr + sequence)
        table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    else:
        length = num_queries
        table_ptr = tables_ptr
        k_ptr += first_token.to(tl.int64) * k_token_stride
        v_ptr += first_token.to(tl.int64) * v_token_stride
    k_ptr += kv_head * k_head_stride
    v_ptr += kv_head * v_head_stride

    row, dim = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    query, head = first_query + row // GROUP, kv_head * GROUP + row % GROUP
    row_mask = (row < QUERIES * GROUP) & (query < num_queries)
    tile_mask = row_mask[:, None]
    token = first_token.to(tl.int64) + query
    q_address = token * q_token_stride + head * q_head_stride
    q = tl.load(q_ptr + q_address[:, None] + dim[None, :], mask=tile_mask, other=0.0)
    position = tl.where(row_mask, length - num_queries + query, -1)

    first_position = length - num_queries + first_query
    stop = tl.minimum(first_position + QUERIES, length)
    seen_by_all = first_position + 1
    first_split = 0
    if WINDOW > 0:
        first_split = tl.maximum(first_position - WINDOW + 1, 0) // split_keys
        seen_by_all = 0
    keys = (k_ptr, v_ptr, table_ptr, length, k_token_stride, v_token_stride)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    output_row = token * NUM_HEADS + head
    for split in range(
        first_split + tl.program_id(2), tl.cdiv(stop, split_keys), tl.num_programs(2)
    ):
        start, end = split * split_keys, tl.minimum((split + 1) * split_keys, stop)
        if WINDOW > 0:
            start = tl.maximum(start, (first_position - WINDOW + 1) // KEYS * KEYS)
        border = tl.maximum(tl.minimum(end, seen_by_all) // KEYS * KEYS, start)
        # Every row sees the keys before `border`, which begins a tile.
        softmax = (
            tl.full([ROWS], float("-inf"), tl.float32),
            tl.zeros([ROWS, SUM_COLUMNS], tl.float32),
            tl.zeros([ROWS, HEAD_DIM], tl.float32),
        )
        if WINDOW == 0:
            softmax = _attend_tiles(
                softmax, q, keys, position, start, border, scale, HEAD_DIM, PAGE, 0, KEYS, False
            )
        part_maximum, part_totals, part_weighted = _attend_tiles(
            softmax, q, keys, position, border, end, scale, HEAD_DIM, PAGE, WINDOW, KEYS, True
        )
        part_total = tl.max(part_totals, 1)  # of equal columns
        if PARALLEL:
            part = output_row * max_splits + split
            address = part[:, None] * HEAD_DIM + dim[None, :]
            tl.store(output_ptr + address, part_weighted, mask=tile_mask)
            tl.store(log_sums_ptr + part, part_maximum, mask=row_mask)
            tl.store(sums_ptr + part, part_total, mask=row_mask)
        else:
            maximum, total, weighted = _fold(
                (maximum, total, weighted), (part_maximum, part_total, part_weighted)
            )
    if not PARALLEL:
        address = output_row[:, None] * HEAD_DIM + dim[None, :]
        tl.store(output_ptr + address, _normalise(total, weighted), mask=tile_mask)
        if PAGE == 0:
            log_sum = (maximum + tl.log2(total)) * LN_2
            tl.store(log_sums_ptr + head.to(tl.int64) * num_tokens + token, log_sum, mask=row_mask)


@triton.jit(do_not_specialize=["max_splits"])
def _fold_kernel(
    output_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    borders_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    max_splits: tl.tensor,
    split_keys: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    """Folds the splits of one query and head in the order of `_attend_kernel`."""
    sequence, head = tl.program_id(0) // NUM_HEADS, tl.program_id(0) % NUM_HEADS
    query = tl.program_id(1)
    first_token = tl.load(borders_ptr + sequence)
    num_queries = tl.load(borders_ptr + sequence + 1) - first_token
    if query >= num_queries:
        return
    position = tl.load(lengths_ptr + sequence) - num_queries + query
    first_split = 0
    if WINDOW > 0:
        first_split = tl.maximum(position - WINDOW + 1, 0) // split_keys
    row, dim = tl.arange(0, 1), tl.arange(0, HEAD_DIM)
    output_row = (first_token + query).to(tl.int64) * NUM_HEADS + head + row
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    weighted = tl.zeros([1, HEAD_DIM], tl.float32)
    for split in range(first_split, tl.cdiv(position + 1, split_keys)):
        part = output_row * max_splits + split
        address = part[:, None] * HEAD_DIM + dim[None, :]
        next_part = (
            tl.load(maxima_ptr + part),
            tl.load(sums_ptr + part),
            tl.load(parts_ptr + address),
        )
        maximum, total, weighted = _fold((maximum, total, weighted), next_part)
    address = output_row[:, None] * HEAD_DIM + dim[None, :]
    tl.store(output_ptr + address, _normalise(total, weighted))
