"""Decoding from keys and values in pages: a Triton kernel, and how it is launched.

Decode reads each sequence's keys and values once and little else, so it is bound by memory. The
keys of all sequences are cut into tiles and laid end to end; the grid has as many *KV splits* as
fill the device, and each takes an equal run of tiles, whatever the lengths of the sequences are
(stream-K, https://arxiv.org/abs/2301.03598; the parts of a sequence are merged by their log-sum-exp
as in flash-decoding, https://pytorch.org/blog/flash-decoding/). The split that finishes the last
part of a sequence merges them, so a decode is one launch. Splits find their run from the lengths
on the device: the launch depends on shapes alone, and a captured graph divides the lengths that it
meets, not the longest that it was recorded for.

One program serves one split and one key head; the query heads that share the key head are the rows
of a tile of at least 16, the smallest that the matrix units take. Keys shared by a group of
sequences come first in the run of tiles; their rows are the query heads of all members. Softmax
runs in float32 and base 2.

On Hopper GPUs the kernel starts while the one ahead still runs. Every split finds its place, then
waits. The lengths that it reads until then are input of the whole step; the newest keys, which the
kernel ahead may write, come afterwards.

This module imports triton; `hone.attention.backends` imports it only where it is used.
"""
# A launch passes plain numbers for constexpr parameters and takes `num_warps`, which the types of
# triton do not know; numbers become tensors in a kernel, and constexpr parameters are what they
# hold; names are bound under one constexpr condition and used under the same; kernels take their
# pointers by position, and constexpr conditions must stand alone.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportUnnecessaryComparison=false
# ruff: noqa: C901, PLR0912, PLR0915, PLR0917, SIM102

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hone.attention.context import FP8_DTYPE, SharedPrefix
from hone.attention.decode_keys import attend, nothing
from hone.attention.decode_parts import (
    add_own_parts,
    add_part,
    add_parts,
    add_shared_parts,
    of_row,
    part_of,
    store_output,
    store_part,
)
from hone.attention.decode_tiles import (
    DecodeShape,
    dot_rows,
    find_group,
    find_sequence,
    first_key,
    power_of_two,
    shared_tiles,
    tiles_before_each,
    tiles_of,
    tiles_of_all,
)
from hone.attention.launch_overlap import overlaps

__all__ = ["DecodeTuning", "choose_tuning", "decode_attention"]

MIN_SHARED_TILES = tl.constexpr(4)
"""Fewest tiles of shared keys per split, since each part costs all members a merge."""
MAX_PARTS = 48
"""Most splits per sequence: merging a part costs as much as reading a few keys."""
MIN_COUNTERS = 1 << 16


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """Launch parameters of the decode kernel."""

    tile: int  # keys a step, a power of two
    num_warps: int
    num_stages: int
    programs_per_processor: int
    max_registers: int | None = None  # a thread


def choose_tuning(num_rows: int, head_dim: int, *, is_fp8: bool, batch: int = 1) -> DecodeTuning:
    """The fastest of those measured on an H200 by `benchmarks/gpu/decode_sweep.py`.

    `num_rows` are the rows of the largest tile of queries, `batch` the sequences. As many programs
    are launched as are resident at a time, else the last ones would run alone. More than 32 rows
    have not been tuned beyond fitting into registers.
    """
    # Tried in whole steps on an H200 (benchmarks/README.md, "What did not pay"): with 8 programs on
    # a multiprocessor in place of 4, 0.6B gains 1 % at 256 sequences (8.24 to 8.17 ms) and loses
    # 8 % at 32 (1.79 to 1.93 ms), and 8B gains nothing; 5, 6 or 10 make 8B 10 to 21 % slower.
    # Reading the first one or two tiles of keys before the previous kernel ends made 8B slower too
    # (15.91 to 15.99 and 16.11 ms).
    tile = 64 if head_dim <= 128 else 32
    if num_rows > 32:
        num_warps = 4 if num_rows <= 64 else 8
        return DecodeTuning(tile, num_warps, 2, 8 // num_warps)
    if not is_fp8:
        return DecodeTuning(tile, 2, 3, 8 if batch >= 512 and num_rows <= 4 else 4)
    if num_rows > 4 or head_dim > 128:
        return DecodeTuning(2 * tile, 2, 3, 4)
    return DecodeTuning(tile, 2, 3, 6, max_registers=168)


def decode_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    max_context_len: int,
    *,
    scale: float,
    scales: Tensor | None = None,
    shared: SharedPrefix | None = None,
    window: int | None = None,
    softcap: float | None = None,
    tuning: DecodeTuning | None = None,
) -> Tensor:
    """The last token of each sequence against its paged keys.

    q is [B, Hq, D] with contiguous heads; kv_cache
    [2, num_blocks, block_size, Hkv, D], float8_e4m3fn with `scales` [2, Hkv] float32 or of q's
    dtype without; block_tables [B, max_blocks] and context_lens [B] are int32. Returns
    [B, Hq, D]; a sequence of length 0 gives zeros.

    The launch depends on shapes and `max_context_len` only, so a captured graph can be replayed
    with other lengths up to it. Launches on one device must follow one another, as they do on one
    stream: they share the counters that tell the last part of a sequence.

    A group of `shared` reads its keys once for its M members. A layer with a window below
    `max_context_len` leaves `shared` aside: it reads the last keys of each sequence alone.

    Raises RuntimeError where the very first launch on a device is made while a graph is recorded.
    """
    batch, num_heads, head_dim = q.shape
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
    groups, members = shared.rows.shape if shared is not None else (0, 1)
    tuning = tuning or choose_tuning(
        heads_per_key * members, head_dim, is_fp8=scales is not None, batch=batch
    )
    keys = max_context_len if window is None else window + 1 + block_size
    splits = _num_splits(tuning, batch, keys, num_kv_heads, q.device)
    shape = DecodeShape(
        num_kv_heads=num_kv_heads,
        heads_per_key=heads_per_key,
        head_dim=head_dim,
        page=block_size,
        members=members,
        is_fp8=scales is not None,
        window=window or 0,
        softcap=softcap or 0.0,
        tile=tuning.tile,
    )
    is_early = overlaps(q.get_device())
    output = q.new_empty(q.shape)
    parts_shape = (
        (batch + splits) + (groups + splits if groups else 0) * members,
        num_heads,
    )
    partial = q.new_empty((*parts_shape, head_dim), dtype=torch.float32)
    log_sums = q.new_empty(parts_shape, dtype=torch.float32)
    places = q.new_empty((batch, num_kv_heads, 2), dtype=torch.int32) if groups else None
    _decode_kernel[(num_kv_heads, splits)](
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
        S=shape,
        OVERLAP=is_early,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        maxnreg=tuning.max_registers,
        enable_fp_fusion=False,  # `hone.attention.decode_parts` says why
        **({"launch_pdl": True} if is_early else {}),
    )
    return output


def _num_splits(
    tuning: DecodeTuning, batch: int, max_keys: int, num_kv_heads: int, device: torch.device
) -> int:
    """Number of splits: as many as fill the device, but none that would never have work."""
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
    """Zeros, int32 [size], to which every launch resets them. Never freed: captured graphs refer to
    them."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "decode_attention must run once before a graph with it is recorded: its counters would "
            "be set to zero by the graph, not now"
        )
    return torch.zeros(size, dtype=torch.int32, device=device)


# Numbers that change from step to step must not trigger a recompilation.
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
    S: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    HEADS: tl.constexpr = S.heads_per_key
    kv_head, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    lengths = (context_lens_ptr, starts_ptr)
    queries = (q_ptr, q_token_stride, q_head_stride, context_lens_ptr)
    keys = (cache_ptr + kv_head * S.head_dim, values_offset)
    parts = (partial_ptr, log_sums_ptr)
    value_scale = 1.0
    if S.is_fp8:
        scale *= tl.load(scales_ptr + kv_head)
        value_scale = tl.load(scales_ptr + S.num_kv_heads + kv_head)

    own_total = tiles_of_all(lengths, batch, S)
    own_split_tiles = tl.cdiv(own_total, splits)
    own_cursor = split * own_split_tiles
    own_stop = tl.minimum(own_cursor + own_split_tiles, own_total)
    sequence, before = find_sequence(lengths, batch, own_cursor, S)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()

    shared_partial = (batch + splits) * (S.num_kv_heads * HEADS)
    if shared_lens_ptr is not None:
        ROWS: tl.constexpr = dot_rows(S.members * HEADS)
        row = tl.arange(0, ROWS)
        tiles = shared_tiles(shared_lens_ptr, groups, S)
        shared_split_tiles = tl.maximum(tl.cdiv(tiles, splits), MIN_SHARED_TILES)
        # Counted from the last split: with few sequences that one has no keys of its own.
        shared_split = splits - 1 - split
        cursor = shared_split * shared_split_tiles
        stop = tl.minimum(cursor + shared_split_tiles, tiles)
        while cursor < stop:
            group, group_before = find_group(shared_lens_ptr, groups, cursor, S)
            length = tl.load(shared_lens_ptr + group)
            group_tiles = tl.cdiv(length, S.tile)
            part_stop = tl.minimum(stop - group_before, group_tiles)
            part_tiles = group_before + part_stop - cursor
            first_member = members_ptr + group * S.members
            row_sequence = tl.load(
                first_member + row // HEADS, mask=row < S.members * HEADS, other=-1
            )
            table_ptr = block_tables_ptr + tl.load(first_member).to(tl.int64) * table_stride
            start_key = (cursor - group_before) * S.tile
            stop_key = tl.minimum(part_stop * S.tile, length)
            rows = (row_sequence, row % HEADS, kv_head)
            maximum, total, weighted = attend(
                queries, keys, table_ptr, rows, start_key, stop_key, scale, ROWS, S
            )
            place = ((group + shared_split) * S.num_kv_heads + kv_head) * S.members
            part = shared_partial + place.to(tl.int64) * HEADS + row
            softmax = (maximum, total, weighted * value_scale)
            store_part(parts, part, row_sequence >= 0, softmax, S)
            # Each member gets the index of its first part and the number of parts.
            first_split = group_before // shared_split_tiles
            num_parts = (group_before + group_tiles - 1) // shared_split_tiles - first_split + 1
            first_place = ((group + first_split) * S.num_kv_heads + kv_head) * S.members
            member = tl.arange(0, power_of_two(S.members))
            member_sequence = tl.load(first_member + member, mask=member < S.members, other=-1)
            exists = member_sequence >= 0
            counter = member_sequence * S.num_kv_heads + kv_head
            tl.store(places_ptr + 2 * counter, first_place + member, mask=exists)
            tl.store(places_ptr + 2 * counter + 1, num_parts, mask=exists)
            own_tiles = tiles_of(lengths, member_sequence, exists, S)
            tl.debug_barrier()
            seen = tl.atomic_add(counters_ptr + counter, part_tiles, mask=exists, sem="acq_rel")
            last = (exists & (seen + part_tiles == group_tiles + own_tiles)).to(tl.int32)
            if tl.sum(last, 0) > 0:
                row_member = row // HEADS
                merges = of_row(last, member, row_member) > 0
                rows = (tl.where(merges, row_sequence, -1), row % HEADS, kv_head)
                own_before = tiles_before_each(lengths, batch, member_sequence, S)
                before_row = of_row(own_before, member, row_member)
                row_tiles = of_row(own_tiles, member, row_member)
                merged = add_own_parts(
                    parts, rows, before_row, row_tiles, own_split_tiles, nothing(ROWS, S), ROWS, S
                )
                first_part = shared_partial + first_place.to(tl.int64) * HEADS + row
                stride = S.num_kv_heads * S.members * HEADS
                count = tl.where(merges, num_parts, 0)
                merged = add_parts(parts, first_part, stride, count, merged, ROWS, S)
                store_output(output_ptr, rows, merged, S)
                tl.store(counters_ptr + counter, 0, mask=last > 0)
            cursor = group_before + part_stop

    cursor, stop = own_cursor, own_stop
    OWN_ROWS: tl.constexpr = dot_rows(HEADS)
    own_row = tl.arange(0, OWN_ROWS)
    merge_row = tl.arange(0, power_of_two(HEADS))
    while cursor < stop:
        length = tl.load(context_lens_ptr + sequence)
        start = 0
        if starts_ptr is not None:
            start = tl.load(starts_ptr + sequence)
        first = first_key(length, start, S)
        own_tiles = tl.maximum(tl.cdiv(length - first, S.tile), 1)
        group_tiles = tl.cdiv(start, S.tile)
        part_stop = tl.minimum(stop - before, own_tiles)
        part_tiles = before + part_stop - cursor
        rows = (tl.where(own_row < HEADS, sequence, -1), own_row, kv_head)
        table_ptr = block_tables_ptr + sequence.to(tl.int64) * table_stride
        start_key = first + (cursor - before) * S.tile
        stop_key = tl.minimum(first + part_stop * S.tile, length)
        maximum, total, weighted = attend(
            queries, keys, table_ptr, rows, start_key, stop_key, scale, OWN_ROWS, S
        )
        weighted *= value_scale
        counter = sequence * S.num_kv_heads + kv_head
        is_done = (part_tiles == own_tiles) & (start == 0)
        if starts_ptr is not None:
            # The shared keys came first: usually their parts are ready.
            if (part_tiles == own_tiles) & (start > 0):
                seen = tl.atomic_add(counters_ptr + counter, 0, sem="acquire")
                if seen == group_tiles:
                    log_sum, values = part_of((maximum, total, weighted))
                    own_part = add_part(log_sum, values, nothing(OWN_ROWS, S))
                    maximum, total, weighted = add_shared_parts(
                        parts, shared_partial, places_ptr, counter, own_row, own_part, OWN_ROWS, S
                    )
                    tl.store(counters_ptr + counter, 0)
                    is_done = True
        softmax = (maximum, total, weighted)
        if is_done:
            store_output(output_ptr, rows, softmax, S)
        else:
            slot = (sequence + split).to(tl.int64) * S.num_kv_heads + kv_head
            part = slot * HEADS + own_row
            store_part(parts, part, own_row < HEADS, softmax, S)
            # The program that finishes a sequence's last tiles merges its parts.
            tl.debug_barrier()
            seen = tl.atomic_add(counters_ptr + counter, part_tiles, sem="acq_rel")
            if seen + part_tiles == own_tiles + group_tiles:
                MERGE_ROWS: tl.constexpr = power_of_two(HEADS)
                merge_rows = (tl.where(merge_row < HEADS, sequence, -1), merge_row, kv_head)
                empty = nothing(MERGE_ROWS, S)
                all_maximum, all_total, all_weighted = add_own_parts(
                    parts, merge_rows, before, own_tiles, own_split_tiles, empty, MERGE_ROWS, S
                )
                merged = (all_maximum, all_total, all_weighted)
                if starts_ptr is not None:
                    if start > 0:
                        merged = add_shared_parts(
                            parts,
                            shared_partial,
                            places_ptr,
                            counter,
                            merge_row,
                            merged,
                            MERGE_ROWS,
                            S,
                        )
                store_output(output_ptr, merge_rows, merged, S)
                tl.store(counters_ptr + counter, 0)
        cursor = before + part_stop
        before += own_tiles
        sequence += 1
