"""The row sums of a weight manifest on CUDA: one launch for many tensors. Needs triton."""
# A launch takes `num_warps`, which the types of triton do not know.
# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["row_sums"]


def row_sums(tensors: Sequence[Tensor], table: Tensor) -> Tensor:
    """Cut flat int32 tensors into rows as wide as `table`, the last of each may be shorter.

    Returns `row @ table` for every row in wrapping int64 arithmetic: [R] int64. The width is a
    power of two.
    """
    width = table.shape[0]
    num_words = np.array([words.numel() for words in tensors])
    num_rows = -(-num_words // width)
    offset = (np.arange(num_rows.sum()) - np.repeat(num_rows.cumsum() - num_rows, num_rows)) * width
    address = np.repeat([words.data_ptr() for words in tensors], num_rows) + 4 * offset
    length = np.repeat(num_words, num_rows) - offset
    # From page-locked memory, so that the host does not wait for what the device has to do before.
    rows = torch.from_numpy(np.stack([address, length])).pin_memory()
    rows = rows.to(table.device, non_blocking=True)
    sums = torch.empty_like(rows[0])
    if len(sums):
        _row_sums_kernel[(len(sums),)](*rows, table, sums, WIDTH=width, num_warps=16)
    return sums


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
