"""Triton kernels in which ranks read each other's memory: the sum of a layer, the gather of logits.

Every program has *mailboxes*: places in the memory of its own rank that the same program of every
other rank can read. It posts its part, tells the others, waits until theirs is posted, and reads
all parts in the order of ranks, so that every rank computes the same bits. This is the one-shot
all-reduce of TensorRT-LLM and vLLM (no rank forwards anything), within one kernel with what
follows the sum.

A program has two places and uses them by turns. It posts into the first again only after a meeting
in which the others said that they post into the second, and these have then left the launch in
which they read the first. So one meeting a launch is enough, whatever was launched in between.
The number of the meeting lies on the device: a CUDA graph can be replayed, as long as all ranks
launch the same. A rank that does not come is waited for without end. More programs than fit on a
device at once do no harm, since all devices begin them in the same order.

This module imports triton; `hone.models.tensor_parallel` imports it only where it is used.
"""
# A launch passes plain numbers for constexpr parameters and takes `num_warps`, which the types of
# triton do not know. Operators of `tl.tensor` are untyped.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: PLR0917

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["GatherMailboxes", "SumMailboxes"]

NORM_ELEMENTS_PER_WARP = 512
GATHER_TILE = 4096
"""Number of logits that one program transfers."""
GATHER_WARPS = 8

Connect = Callable[[int], Sequence[Tensor]]
"""Allocates this many bytes, zeroed, on every rank, and returns each rank's memory as uint8."""


class _Mailboxes:
    """Mailboxes of `place_bytes` for `num_programs` programs on each of `size` ranks."""

    def __init__(
        self, connect: Connect, *, rank: int, size: int, num_programs: int, place_bytes: int
    ) -> None:
        self.rank, self.size, self.num_programs = rank, size, num_programs
        places_bytes = -(-2 * num_programs * place_bytes // 16) * 16
        flags_bytes = 4 * num_programs * size
        self._memory = connect(places_bytes + flags_bytes)  # kept alive
        device = self._memory[rank].device
        places = torch.tensor([memory.data_ptr() for memory in self._memory], device=device)
        self._places, self._flags = places, places + places_bytes
        self._meetings = torch.zeros(num_programs, dtype=torch.int32, device=device)

    @property
    def _shared(self) -> dict[str, Tensor | int]:
        """Arguments that all kernels take."""
        return {
            "places_ptr": self._places,
            "flags_ptr": self._flags,
            "meetings_ptr": self._meetings,
            "RANK": self.rank,
            "SIZE": self.size,
            "PROGRAMS": self.num_programs,
        }


class SumMailboxes(_Mailboxes):
    """Mailboxes for sums of up to `max_rows` rows of `width` values of `dtype`."""

    def __init__(
        self,
        connect: Connect,
        *,
        rank: int,
        size: int,
        max_rows: int,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        self.max_rows = max_rows
        super().__init__(
            connect,
            rank=rank,
            size=size,
            num_programs=max_rows,
            place_bytes=width * dtype.itemsize,
        )

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centred: bool = False
    ) -> Tensor:
        """`layer_kernels.add_rms_norm` of the sum of x [T, D] over ranks. Parts are added in
        float32 in the order of ranks and rounded once. T is at most `max_rows`."""
        num_rows, width = residual.shape
        assert num_rows <= self.max_rows, f"{num_rows=} > {self.max_rows=}"
        block = triton.next_power_of_2(width)
        output = torch.empty_like(residual)
        _sum_add_norm_kernel[(num_rows,)](
            output,
            residual,
            x,
            weight,
            eps,
            **self._shared,
            ZERO_CENTRED=zero_centred,
            WIDTH=width,
            BLOCK=block,
            num_warps=min(max(block // NORM_ELEMENTS_PER_WARP, 1), 16),
        )
        return output


class GatherMailboxes(_Mailboxes):
    """Mailboxes for gathering float32 rows, in as many launches as needed."""

    def __init__(self, connect: Connect, *, rank: int, size: int, num_programs: int) -> None:
        super().__init__(
            connect,
            rank=rank,
            size=size,
            num_programs=num_programs,
            place_bytes=GATHER_TILE * torch.float32.itemsize,
        )

    def gather_columns(self, x: Tensor) -> Tensor:
        """Concatenate the columns of x [N, C] float32, contiguous, of all ranks: [N, size * C]."""
        num_rows, width = x.shape
        num_tiles = triton.cdiv(width, GATHER_TILE)
        assert num_tiles <= self.num_programs, f"{num_tiles=} > {self.num_programs=}"
        output = x.new_empty(num_rows, self.size * width)
        rows_at_once = self.num_programs // num_tiles
        for target, source in zip(output.split(rows_at_once), x.split(rows_at_once), strict=True):
            _gather_kernel[(len(source), num_tiles)](
                target,
                source,
                **self._shared,
                WIDTH=width,
                BLOCK=GATHER_TILE,
                num_warps=GATHER_WARPS,
            )
        return output


@triton.jit
def _sum_add_norm_kernel(
    output_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    eps: tl.tensor,
    places_ptr: tl.tensor,
    flags_ptr: tl.tensor,
    meetings_ptr: tl.tensor,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    mask = column < WIDTH
    at = row.to(tl.int64) * WIDTH + column
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    residual = tl.load(residual_ptr + at, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    meeting = tl.load(meetings_ptr + row) + 1
    place = ((meeting & 1) * PROGRAMS + row).to(tl.int64) * WIDTH + column
    tl.store(_memory_of(places_ptr, RANK, dtype) + place, x, mask=mask)
    _meet(flags_ptr, meetings_ptr, row, meeting, RANK, SIZE)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(SIZE):
        part = x
        if rank != RANK:
            part = tl.load(_memory_of(places_ptr, rank, dtype) + place, mask=mask, other=0.0)
        total += part.to(tl.float32)
    # From here on as in `layer_kernels`: float32, rounded after every operation.
    total = (residual.to(tl.float32) + total.to(dtype).to(tl.float32)).to(dtype)
    tl.store(residual_ptr + at, total, mask=mask)
    exact = total.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(exact * exact, axis=0) / WIDTH + eps)
    normed = exact * inverse
    if ZERO_CENTRED:
        normed *= 1.0 + weight.to(tl.float32)
    else:
        normed = normed.to(dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(output_ptr + at, normed.to(dtype), mask=mask)


@triton.jit
def _gather_kernel(
    output_ptr: tl.tensor,
    x_ptr: tl.tensor,
    places_ptr: tl.tensor,
    flags_ptr: tl.tensor,
    meetings_ptr: tl.tensor,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    program = tl.program_id(0) * tl.num_programs(1) + tile
    inside = tl.arange(0, BLOCK)
    column = tile * BLOCK + inside
    mask = column < WIDTH
    x = tl.load(x_ptr + row * WIDTH + column, mask=mask)
    meeting = tl.load(meetings_ptr + program) + 1
    place = ((meeting & 1) * PROGRAMS + program).to(tl.int64) * BLOCK + inside
    tl.store(_memory_of(places_ptr, RANK, dtype) + place, x, mask=mask)
    _meet(flags_ptr, meetings_ptr, program, meeting, RANK, SIZE)
    output_ptr += row * (SIZE * WIDTH) + column
    for rank in tl.static_range(SIZE):
        part = x
        if rank != RANK:
            part = tl.load(_memory_of(places_ptr, rank, dtype) + place, mask=mask)
        tl.store(output_ptr + rank * WIDTH, part, mask=mask)


@triton.jit
def _meet(
    flags_ptr: tl.tensor,
    meetings_ptr: tl.tensor,
    program: tl.tensor,
    meeting: tl.tensor,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Publish this program's writes, and wait until it may read the others'. A flag holds the
    number of the last meeting that a rank reached, which wraps around."""
    tl.debug_barrier()  # all threads have written
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            flag = _memory_of(flags_ptr, rank, tl.int32) + program * SIZE + RANK
            tl.atomic_xchg(flag, meeting, sem="release", scope="sys")
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            flag = _memory_of(flags_ptr, RANK, tl.int32) + program * SIZE + rank
            last = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            while last - meeting < 0:
                last = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    tl.store(meetings_ptr + program, meeting)
    tl.debug_barrier()  # no thread reads before the one that waited


@triton.jit
def _memory_of(addresses_ptr: tl.tensor, rank: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """Pointer to a rank's memory."""
    return tl.multiple_of(tl.load(addresses_ptr + rank).to(tl.pointer_type(dtype)), 16)
