"""Triton kernels of generation: storing keys and values in pages, and decoding from them.

Decode reads each sequence's keys and values once and little else, so it is bound by memory. The
keys of all sequences are cut into tiles and laid end to end; the grid has as many *lanes* as fill
the device, and each takes an equal run of tiles, whatever the lengths of the sequences are
(stream-K, https://arxiv.org/abs/2301.03598; the parts of a sequence are merged by their log-sum-exp
as in flash-decoding, https://pytorch.org/blog/flash-decoding/). The lane that finishes the last
part of a sequence merges them, so a decode is one launch. Lanes find their run from the lengths
on the device: the launch depends on shapes alone, and a captured graph divides the lengths that it
meets, not the longest that it was recorded for.

One program serves one lane and one key head; the query heads that share the key head and the
queries of one sequence are the rows of a tile of at least 16, the smallest that the matrix units
take. Keys shared by a group of sequences come first in the run of tiles; their rows are the queries
of all members. Softmax runs in float32 and base 2.

This module imports triton; `hone.attention.backends` imports it only where it is used.
"""
# A launch passes plain numbers for constexpr parameters and takes `num_warps`, which the types of
# triton do not know; numbers become tensors in a kernel; names are bound under one constexpr
# condition and used under the same; kernels take their pointers by position, and constexpr
# conditions must stand alone.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false, reportUnnecessaryComparison=false
# ruff: noqa: C901, PLR0912, PLR0915, PLR0917, SIM102

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.attention.context import FP8_DTYPE, SharedPrefix

__all__ = ["DecodeTuning", "choose_tuning", "decode_attention", "write_kv"]

LOG2_E = tl.constexpr(1.4426950408889634)
FP8_MAX = tl.constexpr(448.0)
LENGTHS_AT_ONCE = tl.constexpr(256)
"""Sequences whose lengths a program adds up in one step; more take several."""
MIN_SHARED_TILES = tl.constexpr(4)
"""Fewest tiles of shared keys that a lane takes, as each part costs all members a merge."""
IS_COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
MIN_DOT_ROWS = 16
MAX_PARTS = 48
"""Lanes for each sequence at most: merging a part costs as much as reading a few keys."""
MIN_COUNTERS = 1 << 16


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """How the decode kernel is built and how many programs it gets."""

    tile: int  # keys a step, a power of two
    num_warps: int
    num_stages: int
    programs_per_processor: int
    max_registers: int | None = None  # a thread


def choose_tuning(num_rows: int, head_dim: int, *, is_fp8: bool, batch: int = 1) -> DecodeTuning:
    """The fastest of those measured on an H200 by `tests/gpu/decode_sweep.py`.

    `num_rows` are the rows of the largest tile of queries, `batch` the sequences. As many programs
    are launched as are resident at a time, else the last ones would run alone. More than 32 rows
    are for verifying drafts and have not been tuned beyond fitting into registers.
    """
    tile = 64 if head_dim <= 128 else 32
    if num_rows > 32:
        num_warps = 4 if num_rows <= 64 else 8
        return DecodeTuning(tile, num_warps, 2, 8 // num_warps)
    if not is_fp8:
        return DecodeTuning(tile, 2, 3, 8 if batch >= 512 and num_rows <= 4 else 4)
    if num_rows > 4 or head_dim > 128:
        return DecodeTuning(2 * tile, 2, 3, 4)
    return DecodeTuning(tile, 2, 3, 6, max_registers=168)


def write_kv(
    k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, scales: Tensor | None = None
) -> None:
    """Store k and v, [T, Hkv, D], at slots [T] of kv_cache; slot -1 stores nothing.

    kv_cache is [2, num_blocks, block_size, Hkv, D], contiguous. With `scales` [2, Hkv] float32 it
    is float8_e4m3fn: values are divided by their head's scale, and saturate. One kernel, no host
    wait.
    """
    num_tokens, num_heads, head_dim = k.shape
    assert kv_cache.is_contiguous()
    assert k.stride(2) == v.stride(2) == 1, f"{k.stride()=} {v.stride()=}"
    assert scales is None or scales.is_contiguous()
    _write_kernel[(num_tokens,)](
        k,
        v,
        kv_cache,
        slot_mapping,
        scales,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        kv_cache.stride(0),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
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
    num_queries: int = 1,
    scales: Tensor | None = None,
    shared: SharedPrefix | None = None,
    window: int | None = None,
    softcap: float | None = None,
    tuning: DecodeTuning | None = None,
) -> Tensor:
    """The last `num_queries` tokens of each sequence against its paged keys.

    q is [B * num_queries, Hq, D], ordered by sequence, with contiguous heads; kv_cache
    [2, num_blocks, block_size, Hkv, D], float8_e4m3fn with `scales` [2, Hkv] float32 or of q's
    dtype without; block_tables [B, max_blocks] and context_lens [B] are int32. Returns
    [B * num_queries, Hq, D]; a sequence of length 0 gives zeros.

    The launch depends on shapes and `max_context_len` only, so a captured graph can be replayed
    with other lengths up to it. Launches on one device must follow one another, as they do on one
    stream: they share the counters that tell the last part of a sequence.

    A group of `shared` reads its keys once for its M members. A layer with a window below
    `max_context_len` leaves `shared` aside: it reads the last keys of each sequence alone.

    Raises RuntimeError where the very first launch on a device is made while a graph is recorded.
    """
    num_tokens, num_heads, head_dim = q.shape
    batch = num_tokens // num_queries
    block_size, num_kv_heads = kv_cache.shape[2:4]
    assert q.stride(2) == 1, f"{q.stride()=}"
    assert kv_cache.is_contiguous()
    assert block_tables.stride(1) == 1, f"{block_tables.stride()=}"
    assert (kv_cache.dtype == FP8_DTYPE) == (scales is not None)
    assert scales is None or head_dim % 2 == 0, f"{head_dim=}: FP8 values are read in pairs"
    if window is not None and window >= max_context_len:
        window = None
    if window is not None:
        shared = None
    heads_per_key = num_heads // num_kv_heads
    rows = heads_per_key * num_queries
    groups, members = shared.rows.shape if shared is not None else (0, 1)
    tuning = tuning or choose_tuning(
        rows * members, head_dim, is_fp8=scales is not None, batch=batch
    )
    keys = max_context_len if window is None else window + num_queries + block_size
    lanes = _num_lanes(tuning, batch, keys, num_kv_heads, q.device)
    block_dim = max(MIN_DOT_ROWS, triton.next_power_of_2(head_dim))
    output = q.new_empty(q.shape)
    shape = ((batch + lanes) + (groups + lanes if groups else 0) * members, num_kv_heads * rows)
    partial = q.new_empty((*shape, head_dim), dtype=torch.float32)
    log_sums = q.new_empty(shape, dtype=torch.float32)
    places = q.new_empty((batch, num_kv_heads, 2), dtype=torch.int32) if groups else None
    _decode_kernel[(num_kv_heads, lanes)](
        output,
        partial,
        log_sums,
        _counters(q.device, batch * num_kv_heads),
        places,
        q,
        kv_cache,
        scales,
        block_tables,
        context_lens,
        shared.rows if shared is not None else None,
        shared.lens if shared is not None else None,
        shared.starts if shared is not None else None,
        batch,
        groups,
        scale,
        q.stride(0),
        q.stride(1),
        block_tables.stride(0),
        kv_cache.stride(0),
        QUERIES=num_queries,
        NUM_KV_HEADS=num_kv_heads,
        HEADS_PER_KEY=heads_per_key,
        HEAD_DIM=head_dim,
        PAGE=block_size,
        MEMBERS=members,
        IS_FP8=scales is not None,
        IS_SHARED=shared is not None,
        WINDOW=window or 0,
        SOFTCAP=softcap or 0.0,
        BLOCK_D=block_dim,
        TILE=tuning.tile,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        maxnreg=tuning.max_registers,
    )
    return output


def _num_lanes(
    tuning: DecodeTuning, batch: int, max_keys: int, num_kv_heads: int, device: torch.device
) -> int:
    """As many as fill the device, but none that could never have work."""
    useful = batch * -(-max_keys // tuning.tile)
    filling = _num_processors(device) * tuning.programs_per_processor // num_kv_heads
    return max(1, min(useful, filling, MAX_PARTS * batch))


@cache
def _num_processors(device: torch.device) -> int:
    is_cuda = device.type == "cuda"
    return torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else 4


def _counters(device: torch.device, count: int) -> Tensor:
    return _counters_of_size(device, max(MIN_COUNTERS, triton.next_power_of_2(count)))


@cache
def _counters_of_size(device: torch.device, size: int) -> Tensor:
    """Zeros, int32 [size], as every launch leaves them. Never freed: captured graphs hold them."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "decode_attention must run once before a graph with it is recorded: its counters would "
            "be set to zero by the graph, not now"
        )
    return torch.zeros(size, dtype=torch.int32, device=device)


@triton.jit
def _write_kernel(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    values_offset: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        offset = tl.arange(0, BLOCK)
        mask = offset < NUM_HEADS * HEAD_DIM
        head, dim = offset // HEAD_DIM, offset % HEAD_DIM
        k = tl.load(k_ptr + token * k_token_stride + head * k_head_stride + dim, mask=mask)
        v = tl.load(v_ptr + token * v_token_stride + head * v_head_stride + dim, mask=mask)
        if scales_ptr is not None:
            k = _over(k, tl.load(scales_ptr + head, mask=mask, other=1.0))
            v = _over(v, tl.load(scales_ptr + NUM_HEADS + head, mask=mask, other=1.0))
        target = cache_ptr + slot * (NUM_HEADS * HEAD_DIM) + offset
        tl.store(target, k, mask=mask)
        tl.store(target + values_offset, v, mask=mask)


@triton.jit
def _over(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    return tl.clamp(x.to(tl.float32) / scale, -FP8_MAX, FP8_MAX)


# Numbers that change from step to step must not build the kernel anew.
@triton.jit(do_not_specialize=["batch", "groups", "table_stride"])
def _decode_kernel(
    output_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    counters_ptr: tl.tensor,
    places_ptr: tl.tensor,
    q_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    members_ptr: tl.tensor,
    shared_lens_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    batch: tl.tensor,
    groups: tl.tensor,
    scale: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    table_stride: tl.tensor,
    values_offset: tl.tensor,
    QUERIES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    MEMBERS: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_SHARED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    SEQ_ROWS: tl.constexpr = HEADS_PER_KEY * QUERIES  # rows of one sequence
    kv_head, lane, lanes = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    keys_ptr = cache_ptr + kv_head * HEAD_DIM
    value_scale = 1.0
    if IS_FP8:
        scale *= tl.load(scales_ptr + kv_head)
        value_scale = tl.load(scales_ptr + NUM_KV_HEADS + kv_head)

    own_total = _tiles_before(context_lens_ptr, starts_ptr, batch, QUERIES, PAGE, WINDOW, TILE)
    own_lane_tiles = tl.cdiv(own_total, lanes)
    shared_partial = (batch + lanes) * (NUM_KV_HEADS * SEQ_ROWS)
    if IS_SHARED:
        ROWS: tl.constexpr = _dot_rows(MEMBERS * SEQ_ROWS)
        row = tl.arange(0, ROWS)
        tiles = _shared_tiles_before(shared_lens_ptr, groups, TILE)
        lane_tiles = tl.maximum(tl.cdiv(tiles, lanes), MIN_SHARED_TILES)
        # From the last lane on: with few sequences it is the one that has no keys of its own.
        shared_lane = lanes - 1 - lane
        cursor = shared_lane * lane_tiles
        stop = tl.minimum(cursor + lane_tiles, tiles)
        while cursor < stop:
            group, before = _find_group(shared_lens_ptr, groups, cursor, TILE)
            length = tl.load(shared_lens_ptr + group)
            group_tiles = tl.cdiv(length, TILE)
            part_stop = tl.minimum(stop - before, group_tiles)
            part_tiles = before + part_stop - cursor
            first_member = members_ptr + group * MEMBERS
            row_sequence = tl.load(
                first_member + row // SEQ_ROWS, mask=row < MEMBERS * SEQ_ROWS, other=-1
            )
            maximum, total, weighted = _attend(
                q_ptr,
                keys_ptr,
                context_lens_ptr,
                block_tables_ptr + tl.load(first_member).to(tl.int64) * table_stride,
                row_sequence,
                row % SEQ_ROWS,
                kv_head,
                (cursor - before) * TILE,
                tl.minimum(part_stop * TILE, length),
                scale,
                q_token_stride,
                q_head_stride,
                values_offset,
                QUERIES,
                NUM_KV_HEADS,
                HEADS_PER_KEY,
                HEAD_DIM,
                PAGE,
                IS_FP8,
                WINDOW,
                SOFTCAP,
                ROWS,
                BLOCK_D,
                TILE,
            )
            place = ((group + shared_lane) * NUM_KV_HEADS + kv_head) * MEMBERS
            _store_part(
                partial_ptr,
                log_sums_ptr,
                shared_partial + place.to(tl.int64) * SEQ_ROWS + row,
                row_sequence >= 0,
                maximum,
                total,
                weighted * value_scale,
                HEAD_DIM,
                BLOCK_D,
            )
            # Each member learns where its first part lies and how many there are.
            first_lane = before // lane_tiles
            num_parts = (before + group_tiles - 1) // lane_tiles - first_lane + 1
            first_place = ((group + first_lane) * NUM_KV_HEADS + kv_head) * MEMBERS
            member = tl.arange(0, _power_of_two(MEMBERS))
            sequence = tl.load(first_member + member, mask=member < MEMBERS, other=-1)
            exists = sequence >= 0
            counter = sequence * NUM_KV_HEADS + kv_head
            tl.store(places_ptr + 2 * counter, first_place + member, mask=exists)
            tl.store(places_ptr + 2 * counter + 1, num_parts, mask=exists)
            wanted = group_tiles + _tiles_of(
                context_lens_ptr, starts_ptr, sequence, exists, QUERIES, PAGE, WINDOW, TILE
            )
            tl.debug_barrier()
            seen = tl.atomic_add(counters_ptr + counter, part_tiles, mask=exists, sem="acq_rel")
            last = (exists & (seen + part_tiles == wanted)).to(tl.int32)
            if tl.sum(last, 0) > 0:
                row_member = row // SEQ_ROWS
                merges = _of_row(last, member, row_member) > 0
                merged_sequence = tl.where(merges, row_sequence, -1)
                own_before = _tiles_before_each(
                    context_lens_ptr, starts_ptr, batch, sequence, QUERIES, PAGE, WINDOW, TILE
                )
                maximum, total, weighted = _nothing(ROWS, BLOCK_D)
                maximum, total, weighted = _add_own_parts(
                    partial_ptr,
                    log_sums_ptr,
                    merged_sequence,
                    row % SEQ_ROWS,
                    kv_head,
                    _of_row(own_before, member, row_member),
                    _of_row(wanted - group_tiles, member, row_member),
                    own_lane_tiles,
                    maximum,
                    total,
                    weighted,
                    NUM_KV_HEADS,
                    SEQ_ROWS,
                    ROWS,
                    HEAD_DIM,
                    BLOCK_D,
                )
                maximum, total, weighted = _add_parts(
                    partial_ptr,
                    log_sums_ptr,
                    shared_partial + first_place.to(tl.int64) * SEQ_ROWS + row,
                    NUM_KV_HEADS * MEMBERS * SEQ_ROWS,
                    tl.where(merges, num_parts, 0),
                    maximum,
                    total,
                    weighted,
                    ROWS,
                    HEAD_DIM,
                    BLOCK_D,
                )
                _store_output(
                    output_ptr,
                    merged_sequence,
                    row % SEQ_ROWS,
                    kv_head,
                    total,
                    weighted,
                    QUERIES,
                    NUM_KV_HEADS,
                    HEADS_PER_KEY,
                    HEAD_DIM,
                    BLOCK_D,
                )
                tl.store(counters_ptr + counter, 0, mask=last > 0)
            cursor = before + part_stop

    cursor = lane * own_lane_tiles
    stop = tl.minimum(cursor + own_lane_tiles, own_total)
    if cursor < stop:
        sequence, before = _find_sequence(
            context_lens_ptr, starts_ptr, batch, cursor, QUERIES, PAGE, WINDOW, TILE
        )
        OWN_ROWS: tl.constexpr = _dot_rows(SEQ_ROWS)
        own_row = tl.arange(0, OWN_ROWS)
        merge_row = tl.arange(0, _power_of_two(SEQ_ROWS))
        while cursor < stop:
            length = tl.load(context_lens_ptr + sequence)
            start = 0
            if IS_SHARED:
                start = tl.load(starts_ptr + sequence)
            first = _first_key(length, start, QUERIES, PAGE, WINDOW)
            own_tiles = tl.maximum(tl.cdiv(length - first, TILE), 1)
            group_tiles = tl.cdiv(start, TILE)
            part_stop = tl.minimum(stop - before, own_tiles)
            part_tiles = before + part_stop - cursor
            row_sequence = tl.where(own_row < SEQ_ROWS, sequence, -1)
            maximum, total, weighted = _attend(
                q_ptr,
                keys_ptr,
                context_lens_ptr,
                block_tables_ptr + sequence.to(tl.int64) * table_stride,
                row_sequence,
                own_row,
                kv_head,
                first + (cursor - before) * TILE,
                tl.minimum(first + part_stop * TILE, length),
                scale,
                q_token_stride,
                q_head_stride,
                values_offset,
                QUERIES,
                NUM_KV_HEADS,
                HEADS_PER_KEY,
                HEAD_DIM,
                PAGE,
                IS_FP8,
                WINDOW,
                SOFTCAP,
                OWN_ROWS,
                BLOCK_D,
                TILE,
            )
            weighted *= value_scale
            counter = sequence * NUM_KV_HEADS + kv_head
            is_done = (part_tiles == own_tiles) & (start == 0)
            if IS_SHARED:
                # The shared keys came first: as a rule their parts are there by now.
                if (part_tiles == own_tiles) & (start > 0):
                    seen = tl.atomic_add(counters_ptr + counter, 0, sem="acquire")
                    if seen == group_tiles:
                        maximum, total, weighted = _add_shared_parts(
                            partial_ptr,
                            log_sums_ptr,
                            places_ptr,
                            counter,
                            own_row,
                            shared_partial,
                            maximum,
                            total,
                            weighted,
                            NUM_KV_HEADS,
                            MEMBERS,
                            SEQ_ROWS,
                            OWN_ROWS,
                            HEAD_DIM,
                            BLOCK_D,
                        )
                        tl.store(counters_ptr + counter, 0)
                        is_done = True
            if is_done:
                _store_output(
                    output_ptr,
                    row_sequence,
                    own_row,
                    kv_head,
                    total,
                    weighted,
                    QUERIES,
                    NUM_KV_HEADS,
                    HEADS_PER_KEY,
                    HEAD_DIM,
                    BLOCK_D,
                )
            else:
                slot = (sequence + lane).to(tl.int64) * NUM_KV_HEADS + kv_head
                _store_part(
                    partial_ptr,
                    log_sums_ptr,
                    slot * SEQ_ROWS + own_row,
                    own_row < SEQ_ROWS,
                    maximum,
                    total,
                    weighted,
                    HEAD_DIM,
                    BLOCK_D,
                )
                # Whoever adds the last tiles of a sequence merges its parts.
                tl.debug_barrier()
                seen = tl.atomic_add(counters_ptr + counter, part_tiles, sem="acq_rel")
                if seen + part_tiles == own_tiles + group_tiles:
                    MERGE_ROWS: tl.constexpr = _power_of_two(SEQ_ROWS)
                    merged_sequence = tl.where(merge_row < SEQ_ROWS, sequence, -1)
                    all_maximum, all_total, all_weighted = _nothing(MERGE_ROWS, BLOCK_D)
                    all_maximum, all_total, all_weighted = _add_own_parts(
                        partial_ptr,
                        log_sums_ptr,
                        merged_sequence,
                        merge_row,
                        kv_head,
                        before,
                        own_tiles,
                        own_lane_tiles,
                        all_maximum,
                        all_total,
                        all_weighted,
                        NUM_KV_HEADS,
                        SEQ_ROWS,
                        MERGE_ROWS,
                        HEAD_DIM,
                        BLOCK_D,
                    )
                    if IS_SHARED:
                        if start > 0:
                            all_maximum, all_total, all_weighted = _add_shared_parts(
                                partial_ptr,
                                log_sums_ptr,
                                places_ptr,
                                counter,
                                merge_row,
                                shared_partial,
                                all_maximum,
                                all_total,
                                all_weighted,
                                NUM_KV_HEADS,
                                MEMBERS,
                                SEQ_ROWS,
                                MERGE_ROWS,
                                HEAD_DIM,
                                BLOCK_D,
                            )
                    _store_output(
                        output_ptr,
                        merged_sequence,
                        merge_row,
                        kv_head,
                        all_total,
                        all_weighted,
                        QUERIES,
                        NUM_KV_HEADS,
                        HEADS_PER_KEY,
                        HEAD_DIM,
                        BLOCK_D,
                    )
                    tl.store(counters_ptr + counter, 0)
            cursor = before + part_stop
            before += own_tiles
            sequence += 1


@triton.constexpr_function
def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


@triton.constexpr_function
def _dot_rows(rows: int) -> int:
    return max(16, 1 << (rows - 1).bit_length())


@triton.constexpr_function
def _parts_at_once(rows: int) -> int:
    """Parts merged in one step, so that a program has enough loads on their way."""
    return max(1, 16 // rows)


@triton.jit
def _first_key(
    length: tl.tensor,
    start: tl.tensor,
    QUERIES: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """The first key that a sequence reads alone, at the head of a block."""
    if WINDOW > 0:
        start = tl.maximum(length - (QUERIES - 1 + WINDOW), 0) // PAGE * PAGE
    return start


@triton.jit
def _tiles_of(
    context_lens_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    sequence: tl.tensor,
    mask: tl.tensor,
    QUERIES: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Tiles that sequences read alone: at least one, as somebody must write the output."""
    length = tl.load(context_lens_ptr + sequence, mask=mask, other=0)
    start = tl.zeros_like(length)
    if starts_ptr is not None:
        start = tl.load(starts_ptr + sequence, mask=mask, other=0)
    first = _first_key(length, start, QUERIES, PAGE, WINDOW)
    return tl.where(mask, tl.maximum(tl.cdiv(length - first, TILE), 1), 0)


@triton.jit
def _tiles_before(
    context_lens_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    count: tl.tensor,
    QUERIES: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Tiles of the first `count` sequences."""
    total = 0
    for base in range(0, count, LENGTHS_AT_ONCE):
        sequence = base + tl.arange(0, LENGTHS_AT_ONCE)
        total += tl.sum(
            _tiles_of(
                context_lens_ptr,
                starts_ptr,
                sequence,
                sequence < count,
                QUERIES,
                PAGE,
                WINDOW,
                TILE,
            ),
            0,
        )
    return total


@triton.jit
def _tiles_before_each(
    context_lens_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    batch: tl.tensor,
    sequence: tl.tensor,
    QUERIES: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Tiles of the sequences before each of `sequence` [N]."""
    total = tl.zeros_like(sequence)
    for base in range(0, batch, LENGTHS_AT_ONCE):
        other = base + tl.arange(0, LENGTHS_AT_ONCE)
        tiles = _tiles_of(
            context_lens_ptr, starts_ptr, other, other < batch, QUERIES, PAGE, WINDOW, TILE
        )
        total += tl.sum(tl.where(other[None, :] < sequence[:, None], tiles[None, :], 0), 1)
    return total


@triton.jit
def _of_row(values: tl.tensor, member: tl.tensor, row_member: tl.tensor) -> tl.tensor:
    """The value of each row's member."""
    return tl.sum(tl.where(member[None, :] == row_member[:, None], values[None, :], 0), 1)


@triton.jit
def _find_sequence(
    context_lens_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    batch: tl.tensor,
    tile: tl.tensor,
    QUERIES: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The sequence that tile number `tile` belongs to, and the number of tiles before it."""
    found, before, seen = 0, 0, 0
    for base in range(0, batch, LENGTHS_AT_ONCE):
        sequence = base + tl.arange(0, LENGTHS_AT_ONCE)
        exists = sequence < batch
        tiles = _tiles_of(
            context_lens_ptr, starts_ptr, sequence, exists, QUERIES, PAGE, WINDOW, TILE
        )
        is_before = exists & (seen + tl.cumsum(tiles, 0) <= tile)
        found += tl.sum(is_before.to(tl.int32), 0)
        before += tl.sum(tl.where(is_before, tiles, 0), 0)
        seen += tl.sum(tiles, 0)
    return found, before


@triton.jit
def _shared_tiles_before(
    shared_lens_ptr: tl.tensor, count: tl.tensor, TILE: tl.constexpr
) -> tl.tensor:
    """Tiles of the first `count` groups."""
    total = 0
    for base in range(0, count, LENGTHS_AT_ONCE):
        group = base + tl.arange(0, LENGTHS_AT_ONCE)
        length = tl.load(shared_lens_ptr + group, mask=group < count, other=0)
        total += tl.sum(tl.cdiv(length, TILE), 0)
    return total


@triton.jit
def _find_group(
    shared_lens_ptr: tl.tensor, groups: tl.tensor, tile: tl.tensor, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The group that tile number `tile` belongs to, and the number of tiles before it."""
    found, before, seen = 0, 0, 0
    for base in range(0, groups, LENGTHS_AT_ONCE):
        group = base + tl.arange(0, LENGTHS_AT_ONCE)
        exists = group < groups
        tiles = tl.cdiv(tl.load(shared_lens_ptr + group, mask=exists, other=0), TILE)
        is_before = exists & (seen + tl.cumsum(tiles, 0) <= tile)
        found += tl.sum(is_before.to(tl.int32), 0)
        before += tl.sum(tl.where(is_before, tiles, 0), 0)
        seen += tl.sum(tiles, 0)
    return found, before


@triton.jit
def _attend(
    q_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    table_ptr: tl.tensor,
    sequence: tl.tensor,
    sequence_row: tl.tensor,
    kv_head: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    scale: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    values_offset: tl.tensor,
    QUERIES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    IS_FP8: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Keys start .. stop - 1 of one block table for ROWS queries of sequences (-1: no query).

    Returns the largest score, the sum of weights and the weighted sum of values of those keys that
    a query sees.
    """
    dim, column = tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    exists, dim_mask = sequence >= 0, dim < HEAD_DIM
    query, head = sequence_row // HEADS_PER_KEY, sequence_row % HEADS_PER_KEY
    limit = tl.load(context_lens_ptr + sequence, mask=exists, other=0) - (QUERIES - 1) + query
    q_row = (sequence.to(tl.int64) * QUERIES + query) * q_token_stride
    q_row += (kv_head * HEADS_PER_KEY + head) * q_head_stride
    q = tl.load(
        q_ptr + q_row[:, None] + dim[None, :],
        mask=exists[:, None] & dim_mask[None, :],
        other=0.0,
    )
    factor = tl.zeros([ROWS], tl.float32) + scale
    if IS_FP8:
        # Eight-bit floats become float16 in one instruction, bfloat16 only by way of float32; a
        # query is brought into the range of float16.
        largest = tl.max(tl.abs(q.to(tl.float32)), 1)
        largest = tl.where(largest == 0, 1.0, largest)
        q = (q.to(tl.float32) / largest[:, None]).to(tl.float16)
        factor *= largest
    if SOFTCAP == 0:
        factor *= LOG2_E

    maximum, total, weighted = _nothing(ROWS, BLOCK_D)
    if IS_FP8:
        # The transposing loads of the matrix units take 16-bit numbers: values are read in pairs.
        pair = tl.arange(0, BLOCK_D // 2)
        pair_mask = pair < HEAD_DIM // 2
        pairs_ptr = (keys_ptr + values_offset).to(tl.pointer_type(tl.int16))
        even = tl.zeros([ROWS, BLOCK_D // 2], tl.float32)
        odd = tl.zeros([ROWS, BLOCK_D // 2], tl.float32)
    for tile in range(start, stop, TILE):
        position = tile + column
        valid = position < stop
        page = tl.load(table_ptr + position // PAGE, mask=valid, other=0)
        slot = (page.to(tl.int64) * PAGE + position % PAGE) * NUM_KV_HEADS
        key_mask = valid[:, None]
        if HEAD_DIM < BLOCK_D:
            key_mask &= dim_mask[None, :]
        k = tl.load(keys_ptr + slot[:, None] * HEAD_DIM + dim[None, :], mask=key_mask, other=0.0)
        if IS_FP8:
            key_mask = valid[:, None]
            if HEAD_DIM < BLOCK_D:
                key_mask &= pair_mask[None, :]
            pairs = tl.load(
                pairs_ptr + slot[:, None] * (HEAD_DIM // 2) + pair[None, :], mask=key_mask, other=0
            )
            k = k.to(tl.float16)
        else:
            v = tl.load(
                keys_ptr + values_offset + slot[:, None] * HEAD_DIM + dim[None, :],
                mask=key_mask,
                other=0.0,
            )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * factor[:, None]
        if SOFTCAP > 0:
            scores = (2 * tl.sigmoid(2 * scores / SOFTCAP) - 1) * (SOFTCAP * LOG2_E)  # tanh
        visible = (position[None, :] < limit[:, None]) & valid[None, :]
        if WINDOW > 0:
            visible &= position[None, :] >= limit[:, None] - WINDOW
        scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # A query that has seen nothing yet has no finite maximum.
        finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(maximum - finite)
        total = total * shrink + tl.sum(weights, 1)
        if IS_FP8:
            low, high = _unpack_fp8(pairs)
            weights = weights.to(tl.float16)
            even = tl.dot(weights, low, even * shrink[:, None])
            odd = tl.dot(weights, high, odd * shrink[:, None])
        else:
            weighted = weighted * shrink[:, None]
            weighted += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        maximum = new_maximum
    if IS_FP8:
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


@triton.jit
def _store_part(
    partial_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    part: tl.tensor,
    mask: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    weighted: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    dim = tl.arange(0, BLOCK_D)
    empty = total == 0
    divisor = tl.where(empty, 1.0, total)
    log_sum = tl.where(empty, float("-inf"), maximum + tl.log2(divisor))
    tl.store(log_sums_ptr + part, log_sum, mask=mask)
    tl.store(
        partial_ptr + part[:, None] * HEAD_DIM + dim[None, :],
        weighted / divisor[:, None],
        mask=mask[:, None] & (dim < HEAD_DIM)[None, :],
    )


@triton.jit
def _store_output(
    output_ptr: tl.tensor,
    sequence: tl.tensor,
    sequence_row: tl.tensor,
    kv_head: tl.tensor,
    total: tl.tensor,
    weighted: tl.tensor,
    QUERIES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    dim = tl.arange(0, BLOCK_D)
    token = sequence.to(tl.int64) * QUERIES + sequence_row // HEADS_PER_KEY
    target = (token * NUM_KV_HEADS + kv_head) * HEADS_PER_KEY + sequence_row % HEADS_PER_KEY
    tl.store(
        output_ptr + target[:, None] * HEAD_DIM + dim[None, :],
        weighted / tl.where(total == 0, 1.0, total)[:, None],
        mask=(sequence >= 0)[:, None] & (dim < HEAD_DIM)[None, :],
    )


@triton.jit
def _nothing(ROWS: tl.constexpr, BLOCK_D: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The running softmax of no keys: largest score, sum of weights, weighted sum of values."""
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    return maximum, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, BLOCK_D], tl.float32)


@triton.jit
def _add_own_parts(
    partial_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    sequence: tl.tensor,
    sequence_row: tl.tensor,
    kv_head: tl.tensor,
    before: tl.tensor,
    own_tiles: tl.tensor,
    lane_tiles: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    weighted: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    SEQ_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add the parts of what a row's sequence (-1: none) reads alone to a running softmax.

    Lane l keeps its part of sequence s in slot s + l: as lanes and sequences both run upwards, no
    two parts meet, and those of one sequence lie side by side. Groups have slots of their own.
    """
    first = before // lane_tiles
    count = (before + own_tiles - 1) // lane_tiles - first + 1
    slot = (sequence + first).to(tl.int64) * NUM_KV_HEADS + kv_head
    return _add_parts(
        partial_ptr,
        log_sums_ptr,
        slot * SEQ_ROWS + sequence_row,
        NUM_KV_HEADS * SEQ_ROWS,
        tl.where(sequence >= 0, count, 0),
        maximum,
        total,
        weighted,
        ROWS,
        HEAD_DIM,
        BLOCK_D,
    )


@triton.jit
def _add_shared_parts(
    partial_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    places_ptr: tl.tensor,
    counter: tl.tensor,
    sequence_row: tl.tensor,
    shared_partial: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    weighted: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    MEMBERS: tl.constexpr,
    SEQ_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add what the group of a sequence has computed for it to a running softmax."""
    place = tl.load(places_ptr + 2 * counter, cache_modifier=".cg").to(tl.int64)
    count = tl.load(places_ptr + 2 * counter + 1, cache_modifier=".cg")
    return _add_parts(
        partial_ptr,
        log_sums_ptr,
        shared_partial + place * SEQ_ROWS + sequence_row,
        NUM_KV_HEADS * MEMBERS * SEQ_ROWS,
        tl.where(sequence_row < SEQ_ROWS, count, 0),
        maximum,
        total,
        weighted,
        ROWS,
        HEAD_DIM,
        BLOCK_D,
    )


@triton.jit
def _add_parts(
    partial_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    first: tl.tensor,
    stride: tl.tensor,
    count: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    weighted: tl.tensor,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add `count` [ROWS] parts, the first at `first` [ROWS], to a running softmax."""
    PARTS: tl.constexpr = _parts_at_once(ROWS)
    dim = tl.arange(0, BLOCK_D)
    for base in range(0, tl.max(count, 0), PARTS):
        part = base + tl.arange(0, PARTS)
        index = first[None, :] + part[:, None] * stride  # [PARTS, ROWS]
        mask = part[:, None] < count[None, :]
        # Other processors wrote the parts: they are read past this one's own cache.
        log_sums = tl.load(
            log_sums_ptr + index, mask=mask, other=float("-inf"), cache_modifier=".cg"
        )
        values = tl.load(
            partial_ptr + index[:, :, None] * HEAD_DIM + dim[None, None, :],
            mask=mask[:, :, None] & (dim < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_maximum = tl.maximum(maximum, tl.max(log_sums, 0))
        finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(log_sums - finite[None, :])
        shrink = tl.exp2(maximum - finite)
        total = total * shrink + tl.sum(weights, 0)
        weighted = weighted * shrink[:, None] + tl.sum(values * weights[:, :, None], 0)
        maximum = new_maximum
    return maximum, total, weighted
