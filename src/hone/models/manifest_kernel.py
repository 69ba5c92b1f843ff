"""The row sums of a weight manifest on CUDA: one launch for many tensors. Needs triton."""
# A launch takes `num_warps`, which the types of triton do not know.
# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["rounded_row_sums", "row_sums"]

_BLOCK = 2048
"""Number of words of a row that a program rounds and sums at a time."""


def row_sums(tensors: Sequence[Tensor], table: Tensor) -> Tensor:
    """Cut flat int32 tensors into rows as wide as `table`, the last of each may be shorter.

    Returns `row @ table` for every row in wrapping int64 arithmetic: [R] int64. The width is a
    power of two.
    """
    width = table.shape[0]
    num_words = np.array([words.numel() for words in tensors])
    num_rows = -(-num_words // width)
    offset = _index_in_tensor(num_rows) * width
    address = np.repeat([words.data_ptr() for words in tensors], num_rows) + 4 * offset
    length = np.repeat(num_words, num_rows) - offset
    rows = _on_device(np.stack([address, length]), table.device)
    sums = torch.empty_like(rows[0])
    if len(sums):
        _row_sums_kernel[(len(sums),)](*rows, table, sums, WIDTH=width, num_warps=16)
    return sums


def rounded_row_sums(masters: Sequence[Tensor], columns: Sequence[int], table: Tensor) -> Tensor:
    """`row_sums` of the bfloat16 weights that flat, contiguous float32 tensors round to, of which
    the first words lie in these columns of their first rows: [R] int64.

    Rounds to the nearest, ties to even, as torch does; values that are not finite need not agree.
    """
    width = table.shape[0]
    first = 2 * np.array(columns)
    last = first + np.array([master.numel() for master in masters])
    num_rows = -(-last // (2 * width))
    index = _index_in_tensor(num_rows)
    offset = 2 * width * index - np.repeat(first, num_rows)
    # Of the row's first element, which of the first row need not be there.
    address = np.repeat([master.data_ptr() for master in masters], num_rows) + 4 * offset
    begin = np.where(index == 0, np.repeat(first, num_rows), 0)
    end = np.repeat(last, num_rows) - 2 * width * index
    rows = _on_device(np.stack([address, begin, end]), table.device)
    sums = torch.empty_like(rows[0])
    if len(sums):
        _rounded_row_sums_kernel[(len(sums),)](
            *rows, table, sums, WIDTH=width, BLOCK=min(_BLOCK, width), num_warps=8
        )
    return sums


def _index_in_tensor(num_rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Index of each row in its tensor."""
    return np.arange(num_rows.sum()) - np.repeat(num_rows.cumsum() - num_rows, num_rows)


def _on_device(rows: NDArray[np.int64], device: torch.device) -> Tensor:
    """Copy to the device from pinned memory, so that the host does not wait for the device."""
    found = torch.from_numpy(rows)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


@triton.jit
def _row_sums_kernel(
    addresses: tl.tensor,
    lengths: tl.tensor,
    table: tl.tensor,
    sums: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    words = tl.load(addresses + row).to(tl.pointer_type(tl.int32)) + column
    bits = tl.load(words, mask=column < tl.load(lengths + row), other=0)
    tl.store(sums + row, tl.sum(bits.to(tl.int64) * tl.load(table + column), axis=0))


@triton.jit
def _rounded_row_sums_kernel(  # noqa: PLR0917
    addresses: tl.tensor,
    begins: tl.tensor,
    ends: tl.tensor,
    table: tl.tensor,
    sums: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    master = tl.load(addresses + row).to(tl.pointer_type(tl.int32))
    begin = tl.load(begins + row)
    end = tl.load(ends + row)
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        low = _rounded(master, 2 * column, begin, end)
        high = _rounded(master, 2 * column + 1, begin, end)
        total += (low | (high << 16)).to(tl.int64) * tl.load(table + column)
    tl.store(sums + row, tl.sum(total, axis=0))


@triton.jit
def _rounded(master: tl.tensor, i: tl.tensor, begin: tl.tensor, end: tl.tensor) -> tl.tensor:
    """The bits of bfloat16 to which float32 elements round, as integers; 0 outside."""
    bits = tl.load(master + i, mask=(i >= begin) & (i < end), other=0).to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int32, bitcast=True)
