"""A matrix product whose every row is the same bits whatever other rows are computed with it.

Floating-point sums depend on their order. cuBLAS chooses tiles, instructions and split sums from
the number of rows, so that a token's result changes with its batch
(https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/). Here the order of
every sum is a function of K alone:

* K is cut into `num_splits(K)` equal parts. Within a part the matrix unit adds 16 products after
  16 products to one float32 accumulator, in every tile shape and by both instructions that tiles
  use on Hopper (`wgmma`, and `mma.sync` of few rows). Parts are added in order.
* How the parts are *scheduled* depends on the number of rows: few rows give each part a program of
  its own, and they are added up afterwards; many rows run a tile's parts one after the other in one
  program. The additions are the same.

`benchmarks/gpu/exact_check.py` proves this on a device for every tile in use. Operands arrive
through tensor descriptors (TMA on Hopper), which fill what lies outside with zeros. Letters: T rows
(tokens), N outputs, K inputs.

This module imports triton; `hone.models.exact` imports it only where it is used.
"""
# A launch passes plain numbers for constexpr parameters and takes `num_warps`, which the types of
# triton do not know; kernels take their pointers by position.
# pyright: reportArgumentType=false, reportCallIssue=false
# ruff: noqa: PLR0917

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["Tile", "matmul", "num_splits"]

SPLIT_UNIT = 128
"""Parts of K are multiples of this, hence of every tile's depth."""
SPLIT_FROM = 8192
"""Number of inputs from which one part of K would give a row too few programs."""
FULL_DEVICE = 132
"""Number of programs with one for each multiprocessor of the largest Hopper GPU."""
WIDE_FROM = 16384
"""Number of outputs from which few rows fill the device with wide tiles: merged gates, heads."""
BAND = 8
"""Tiles of rows that are computed next to each other, so that they find their weights in L2."""


class Tile(NamedTuple):
    """Work of one program. It never changes the result."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


ROW_TILE = Tile(16, 64, 128, 4, 5)
NARROW_ROW_TILE = Tile(16, 32, 128, 4, 6)
NARROW_TILE = Tile(64, 32, 128, 4, 5)
SMALL_TILE = Tile(64, 64, 128, 4, 6)
DEEP_TILE = Tile(64, 128, 128, 4, 4)
MEDIUM_TILE = Tile(64, 128, 64, 4, 4)
WIDE_TILE = Tile(64, 256, 64, 4, 4)
LARGE_TILE = Tile(128, 128, 64, 8, 3)
LONG_TILE = Tile(128, 256, 64, 8, 4)
TILES = (
    ROW_TILE,
    NARROW_ROW_TILE,
    NARROW_TILE,
    SMALL_TILE,
    DEEP_TILE,
    MEDIUM_TILE,
    WIDE_TILE,
    LARGE_TILE,
    LONG_TILE,
)
"""All tiles from which `matmul` chooses."""


def num_splits(num_inputs: int) -> int:
    """Number of parts of K. It does not depend on N, so that merged and separate projections have
    the same bits."""
    return 2 if num_inputs >= SPLIT_FROM else 1


def matmul(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    tile: Tile | None = None,
    splits: int | None = None,
    parallel: bool | None = None,
) -> Tensor:
    """`x @ weight.T + bias` as [T, N] in `dtype` (default: that of x), summed in float32.

    x and weight are bfloat16 or float16 of one dtype with contiguous rows that start at multiples
    of 16 bytes, so K is a multiple of 8. `splits` belongs to the result and must be the same for
    all calls that are compared; `tile` and `parallel` (a program for each part of K) may change
    the time only. Launches wait for nothing and suit a CUDA graph.
    """
    (num_rows, num_inputs), num_outputs = x_TK.shape, weight_NK.shape[0]
    y_TN = x_TK.new_empty((num_rows, num_outputs), dtype=dtype or x_TK.dtype)
    if num_rows == 0:
        return y_TN
    splits = splits or num_splits(num_inputs)
    tile = tile or _choose_tile(num_rows, num_outputs, num_inputs)
    num_tiles = -(-num_rows // tile.rows) * -(-num_outputs // tile.columns)
    if parallel is None:
        parallel = num_tiles < FULL_DEVICE * 3 // 4
    parallel = parallel and splits > 1
    parts = (
        y_TN.new_empty((splits, num_rows, num_outputs), dtype=torch.float32) if parallel else y_TN
    )
    _matmul_kernel[(num_tiles, splits if parallel else 1)](
        parts,
        y_TN if bias_N is None else bias_N,
        TensorDescriptor.from_tensor(x_TK, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight_NK, [tile.columns, tile.depth]),
        num_rows,
        num_outputs,
        num_inputs,
        splits,
        HAS_BIAS=bias_N is not None and not parallel,
        IS_SPLIT=splits > 1,
        PARALLEL=parallel,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        UNIT=SPLIT_UNIT,
        BAND=BAND,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if parallel:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        y_TN.copy_(total if bias_N is None else total + bias_N)
    return y_TN


def _choose_tile(num_rows: int, num_outputs: int, num_inputs: int) -> Tile:
    """Choose the fastest tile, or nearly, on an H200 at the shapes of Qwen3 0.6B and 8B."""

    def count(tile: Tile) -> int:
        return -(-num_rows // tile.rows) * -(-num_outputs // tile.columns)

    splits, is_wide = num_splits(num_inputs), num_outputs >= WIDE_FROM
    if num_rows <= (32 if num_inputs >= 4096 and not is_wide else 16):
        return ROW_TILE if 2 * count(ROW_TILE) * splits > FULL_DEVICE else NARROW_ROW_TILE
    if num_rows <= WIDE_TILE.rows:
        if is_wide:
            return WIDE_TILE
    elif count(LARGE_TILE) > FULL_DEVICE:
        return LARGE_TILE if splits == 1 else LONG_TILE
    if count(MEDIUM_TILE) > FULL_DEVICE:
        return MEDIUM_TILE
    for tile in (DEEP_TILE, SMALL_TILE):
        if 2 * count(tile) > FULL_DEVICE * 3 // 4:
            return tile
    return NARROW_TILE


@triton.jit
def _sum_part(
    x_desc: tl.tensor_descriptor,
    weight_desc: tl.tensor_descriptor,
    first_row: tl.tensor,
    first_column: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tl.tensor:
    """The products of inputs start .. stop - 1: float32 [ROWS, COLUMNS]."""
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(start, stop, DEPTH):
        x = x_desc.load([first_row, k])
        weight = weight_desc.load([first_column, k])
        total = tl.dot(x, weight.T, total)
    return total


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _matmul_kernel(
    output_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    x_desc: tl.tensor_descriptor,
    weight_desc: tl.tensor_descriptor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    num_splits: tl.tensor,
    HAS_BIAS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    PARALLEL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UNIT: tl.constexpr,
    BAND: tl.constexpr,
) -> None:
    # Programs walk down a band of row tiles before they go on to the next column.
    row_tiles, column_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(num_outputs, COLUMNS)
    band = tl.program_id(0) // (BAND * column_tiles)
    within = tl.program_id(0) % (BAND * column_tiles)
    height = tl.minimum(row_tiles - band * BAND, BAND)
    first_row = (band * BAND + within % height) * ROWS
    first_column = (within // height) * COLUMNS

    part_inputs = tl.cdiv(tl.cdiv(num_inputs, UNIT), num_splits) * UNIT
    if PARALLEL:
        start = tl.program_id(1) * part_inputs
        stop = tl.minimum(start + part_inputs, num_inputs)
        total = _sum_part(
            x_desc, weight_desc, first_row, first_column, start, stop, ROWS, COLUMNS, DEPTH
        )
    elif IS_SPLIT:
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for split in range(num_splits):
            start = split * part_inputs
            stop = tl.minimum(start + part_inputs, num_inputs)
            total += _sum_part(
                x_desc, weight_desc, first_row, first_column, start, stop, ROWS, COLUMNS, DEPTH
            )
    else:
        total = _sum_part(
            x_desc, weight_desc, first_row, first_column, 0, num_inputs, ROWS, COLUMNS, DEPTH
        )

    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    column_mask = column < num_outputs
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    row_start = (tl.program_id(1).to(tl.int64) * num_rows + row) * num_outputs
    mask = (row < num_rows)[:, None] & column_mask[None, :]
    tl.store(output_ptr + row_start[:, None] + column[None, :], total, mask=mask)
