"""Triton products with weights of 8-bit codes (`hone.models.int8_rows`).

A decode step is bound by reading weights, and codes are half the bytes, if nothing has to be done
to each of them: making floats of codes on the way to the matrix units takes longer than reading
twice the bytes. So the rows that are multiplied become integers too, of 16 bits in two planes,

    x = s (256 hi + lo),   hi and lo of 8 bits,   s = the row's largest |x| / 32,639

and a product is two of integers, at twice the rate of 16-bit floats each, whose sums are exact:
y = s_w s_x (256 hi @ w + lo @ w). Rows are rounded by 1.5e-5 of their largest value, where bfloat16
rounds each value by 2e-3 of it. Sums do not depend on their order, and so not on the batch.

Products of many rows, as prompts have them, are bound by arithmetic: there the weight is unpacked
first, by a kernel of its own, for cuBLAS.

This module imports triton; `hone.models.layer_kernels` imports it.
"""
# A launch passes plain numbers for constexpr parameters and takes `num_warps`, which the types of
# triton do not know; kernels take their pointers by position, some of which may be None.
# pyright: reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportUnnecessaryComparison=false
# ruff: noqa: PLR0917

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hone.attention.kernel_launch import (
    SHARED_BYTES,
    fitting_stages,
    launch,
    next_power_of_2,
    shared_bytes,
)
from hone.families.spec import ROW_TAIL_BYTES as TAIL
from hone.models.product_kernels import MULTIPROCESSORS, Tile, gated_product

__all__ = ["MAX_ROWS", "choose_tile", "int8_product", "split_rows", "unpack_rows"]

MAX_ROWS = 256
"""Largest number of rows for which two products of codes are faster than unpacking the weight
first."""
DTYPES = (torch.bfloat16, torch.float16)
MAX_SPLITS = 4
MIN_SHARE = 0.9
"""Target share of busy multiprocessors, as far as sums can be split."""
UNPACK_BLOCK = 2048
SPLIT_BLOCK = 8192
"""Largest block of a row that is split at once."""
LARGEST = tl.constexpr(127 * 256 + 127)
TAIL_BYTES = tl.constexpr(TAIL)


def int8_product(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    split: bool = False,
    tile: Tile | None = None,
) -> Tensor | None:
    """x [T, K] times the rows that `packed` [N, K + 16] stands for, plus bias [N], as [T, N].

    With `gated` the first half of the outputs is a gate: the result is silu(gate) * up, [T, N / 2],
    rounded as by `layer_kernels.silu_mul`, and takes no bias from a tile. With `split`, and without
    a bias, it may be float32 [S, T, N], the parts of a sum. Without a `tile` one is chosen; None
    where there is none, for many rows and other dtypes than 16-bit floats: unpack the weight.
    """
    (num_rows, num_inputs), num_outputs = x.shape, len(packed)
    if tile is None:
        if num_rows <= MAX_ROWS and x.dtype in DTYPES:
            kind = {"gated": gated, "split": split and bias is None}
            memory = shared_bytes(x.get_device())
            tile = choose_tile(num_rows, num_outputs, num_inputs, **kind, memory=memory)
        if tile is None:
            return None
    if gated:
        num_outputs //= 2
    if tile.splits > 1:
        output = x.new_empty(tile.splits, num_rows, num_outputs, dtype=torch.float32)
    else:
        output = x.new_empty(num_rows, num_outputs)
    planes, scales = split_rows(x)
    launch(
        _product_kernel,
        (num_outputs // tile.columns, tile.splits, -(-num_rows // tile.rows)),
        (output, planes, scales, packed, bias),
        (num_rows,),
        (num_outputs, num_inputs, tile.splits, gated, tile.rows, tile.columns, tile.depth),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return output


@lru_cache(maxsize=4096)
def choose_tile(
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    *,
    gated: bool,
    split: bool,
    memory: int = SHARED_BYTES,
) -> Tile | None:
    """The tile of a product, None where none divides the weight.

    The fastest of those that `benchmarks/gpu/int8_check.py` has measured on an H200, with fewer
    stages where a GPU has less `memory` for them than Hopper.
    """
    outputs = num_outputs // 2 if gated else num_outputs
    rows = max(next_power_of_2(num_rows), 16)
    if gated:
        tile = Tile(min(rows, 64), 64, 128, 1, 4, 4 if rows <= 32 else 3)
    elif rows <= 32:
        tile = Tile(rows, 64, 256, 1, 4, 4 if split else 6)
    elif rows <= 64:
        tile = Tile(64, 64, 128, 1, 4, 6)
    elif rows <= 128:
        tile = Tile(128 if split else 64, 64, 128, 1, 4, 4)
    else:
        tile = Tile(64, 128, 128, 1, 8, 4)
    if num_inputs % tile.depth:  # as of 3,200, an eighth of the inner size of 32B
        tile = tile._replace(depth=128)
    if outputs % tile.columns or num_inputs % tile.depth:
        return None
    of_stage = tile.depth * ((1 + gated) * tile.columns + 2 * tile.rows)
    tile = tile._replace(num_stages=fitting_stages(tile.num_stages, of_stage, memory))
    if not split:
        return tile
    programs = outputs // tile.columns * -(-num_rows // tile.rows)
    fitting = [n for n in (1, 2, MAX_SPLITS) if num_inputs % (n * tile.depth) == 0]
    enough = MIN_SHARE * MULTIPROCESSORS
    splits = next((n for n in fitting if n * programs >= enough), fitting[-1])
    return tile._replace(splits=splits)


def split_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows x [T, K], contiguous, as integers of 16 bits in two planes, int8 [2, T, K], hi and lo,
    and the scale of each row, float32 [T]."""
    num_rows, width = x.shape
    planes = x.new_empty(2, num_rows, width, dtype=torch.int8)
    scales = x.new_empty(num_rows, dtype=torch.float32)
    block = min(next_power_of_2(width), SPLIT_BLOCK)
    launch(
        _split_kernel,
        (num_rows, 1, 1),
        (planes, scales, x),
        (num_rows,),
        (width, block),
        num_warps=min(max(block // 512, 1), 8),
    )
    return planes, scales


def unpack_rows(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """`hone.models.int8_rows.unpack_rows` of a contiguous `packed` [..., K + 16] in one launch."""
    *outer, width = packed.shape
    num_inputs = width - TAIL
    output = packed.new_empty((*outer, num_inputs), dtype=dtype)
    launch(
        _unpack_kernel,
        (prod(outer), -(-num_inputs // UNPACK_BLOCK), 1),
        (output, packed),
        (),
        (num_inputs, min(UNPACK_BLOCK, next_power_of_2(num_inputs))),
        num_warps=4,
    )
    return output


@triton.jit(do_not_specialize=["num_rows"])
def _split_kernel(
    planes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    x_ptr: tl.tensor,
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        mask = start + column < WIDTH
        x = tl.load(x_ptr + row * WIDTH + start + column, mask=mask, other=0.0)
        x = tl.abs(x.to(tl.float32))
        largest = tl.maximum(largest, x, propagate_nan=tl.PropagateNan.ALL)
    # Codes have no NaN, and a maximum ignores it: the sum carries NaN into the scale.
    scale = tl.maximum(tl.max(largest, axis=0), 1e-30) / LARGEST + tl.sum(largest * 0.0, axis=0)
    tl.store(scales_ptr + row, scale)
    for start in range(0, WIDTH, BLOCK):
        mask = start + column < WIDTH
        x = tl.load(x_ptr + row * WIDTH + start + column, mask=mask, other=0.0).to(tl.float32)
        # Rounded half up: an integer, so that two planes hold it.
        code = tl.floor(x / scale + 0.5).to(tl.int32)
        high = (code + 128) >> 8
        target_ptr = planes_ptr + row * WIDTH + start + column
        tl.store(target_ptr, high.to(tl.int8), mask=mask)
        low_ptr = target_ptr + num_rows.to(tl.int64) * WIDTH
        tl.store(low_ptr, (code - high * 256).to(tl.int8), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    output_ptr: tl.tensor,
    planes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    num_rows: tl.tensor,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """y = x @ weight.T, float32 parts [SPLITS, T, N] of it, or silu(first half) * second half.
    Tiles are of the transposed product, [columns, rows]."""
    width: tl.constexpr = INPUTS + TAIL_BYTES
    part_inputs: tl.constexpr = INPUTS // SPLITS
    split = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    weight_scale = row_scale(weight_ptr, column, INPUTS)
    up_scale = weight_scale
    if GATED:
        up_scale = row_scale(weight_ptr, OUTPUTS + column, INPUTS)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    mask = row < num_rows
    scale = tl.load(scales_ptr + row, mask=mask, other=0.0)[None, :]
    codes_ptr = weight_ptr + column[:, None] * width + split * part_inputs + depth[None, :]
    high_ptr = planes_ptr + row[:, None] * INPUTS + split * part_inputs + depth[None, :]
    low_ptr = high_ptr + num_rows * INPUTS
    high = tl.zeros([COLUMNS, ROWS], tl.int32)
    low = tl.zeros([COLUMNS, ROWS], tl.int32)
    up_high = tl.zeros([COLUMNS, ROWS], tl.int32)
    up_low = tl.zeros([COLUMNS, ROWS], tl.int32)
    for start in range(0, part_inputs, DEPTH):
        x_high = tl.load(high_ptr + start, mask=mask[:, None], other=0).T
        x_low = tl.load(low_ptr + start, mask=mask[:, None], other=0).T
        codes = tl.load(codes_ptr + start)
        high = tl.dot(codes, x_high, high, out_dtype=tl.int32)
        low = tl.dot(codes, x_low, low, out_dtype=tl.int32)
        if GATED:
            up_codes = tl.load(codes_ptr + OUTPUTS * width + start)
            up_high = tl.dot(up_codes, x_high, up_high, out_dtype=tl.int32)
            up_low = tl.dot(up_codes, x_low, up_low, out_dtype=tl.int32)
    total = join_planes(high, low) * weight_scale[:, None] * scale
    if GATED:
        up = join_planes(up_high, up_low) * up_scale[:, None] * scale
        total = gated_product(total, up, output_ptr.dtype.element_ty)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column).to(tl.float32)[:, None]
    at = (split * num_rows + row).to(tl.int64)[None, :] * OUTPUTS + column[:, None]
    tl.store(output_ptr + at, total, mask=mask[None, :])


@triton.jit
def join_planes(high: tl.tensor, low: tl.tensor) -> tl.tensor:
    """Combine the integer products with both planes into the product with the 16-bit numbers, in
    float32."""
    return high.to(tl.float32) * 256.0 + low.to(tl.float32)


@triton.jit
def row_scale(weight_ptr: tl.tensor, row: tl.tensor, INPUTS: tl.constexpr) -> tl.tensor:
    """Scales of rows of packed weights."""
    scale_ptr = weight_ptr + row * (INPUTS + TAIL_BYTES) + INPUTS
    return tl.load(scale_ptr.to(tl.pointer_type(tl.float32)))


@triton.jit
def _unpack_kernel(
    output_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < INPUTS
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    scale = row_scale(weight_ptr, row, INPUTS)
    codes = tl.load(weight_ptr + row * (INPUTS + TAIL_BYTES) + column, mask=mask, other=0)
    tl.store(output_ptr + row * INPUTS + column, codes.to(tl.float32) * scale, mask=mask)
