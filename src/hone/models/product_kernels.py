"""Triton matrix products of few rows, as a decode step of a small model has them.

With few rows a product is bound by reading its weight, and where that is small, by what comes
before and after: launching, the first bytes, the last sums. A program here asks for its weight to
be brought into the L2 cache before it waits for the kernel ahead of it (programmatic dependent
launch), so that the memory is busy while that one ends. Epilogues save launches: the gate of an MLP
multiplies at once, and sums that are split over programs are added up by the norm that follows.

This module imports triton; `hone.models.layer_kernels` imports it.
"""
# A launch passes plain numbers for constexpr parameters and takes `num_warps`, which the types of
# triton do not know; kernels take their pointers by position, some of which may be None.
# pyright: reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportUnnecessaryComparison=false
# ruff: noqa: PLR0917

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hone.attention.kernel_launch import launch, next_power_of_2

__all__ = ["Tile", "choose_tile", "gated_product", "small_product"]

FEW_ROWS = 64
"""Rows of the smallest tile of Hopper's wgmma. Smaller tiles are not faster for fewer rows."""
MAX_ROWS = 256
"""Largest number of rows for which these kernels are faster, with small weights."""
DTYPES = (torch.bfloat16, torch.float16)
PREFETCHED = 256
"""Inputs of each column that are prefetched before the previous kernel ends; more would crowd it
out of the cache."""
MULTIPROCESSORS = 132
"""Multiprocessors of a Hopper GPU. A tile takes most of the shared memory of one."""
MIN_SHARE = 0.7
"""Smallest share of busy multiprocessors with which a tile is faster than cuBLAS."""
MAX_SPLITS = 4
SMALL_WEIGHT = 8 << 20
"""Largest weight, in values, that is read faster than a kernel starts and ends."""
LINE = tl.constexpr(64)
"""16-bit numbers of a cache line of 128 bytes."""


class Tile(NamedTuple):
    """Split of a product among programs, each with a part of the inputs. For experts, rows are
    tokens."""

    rows: int
    columns: int
    depth: int
    splits: int
    num_warps: int
    num_stages: int


def small_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    split: bool = False,
    tile: Tile | None = None,
) -> Tensor | None:
    """x [T, K] @ weight [N, K].T + bias [N] as [T, N], or None where this is not the way.

    x and weight are contiguous. With `gated` the first half of the outputs is a gate: the result is
    silu(gate) * up, [T, N / 2], rounded as by `layer_kernels.silu_mul`. With `split` it is float32
    [S, T, N], the parts of a sum. Neither takes a bias. None is returned for many rows, weights
    that no tile divides, other dtypes than 16-bit floats and GPUs other than Hopper's, for which
    nothing here has been measured: cuBLAS is faster or alone can do it.
    """
    (num_rows, num_inputs), num_outputs = x.shape, weight.shape[0]
    if tile is None:
        is_served = num_rows <= MAX_ROWS and x.dtype in DTYPES and _is_hopper(x.get_device())
        if not is_served or (bias is not None and (gated or split)):
            return None
        tile = choose_tile(num_rows, num_outputs, num_inputs, gated=gated, split=split)
        if tile is None:
            return None
    if gated:
        num_outputs //= 2
    if split:
        output = x.new_empty(tile.splits, num_rows, num_outputs, dtype=torch.float32)
    else:
        output = x.new_empty(num_rows, num_outputs)
    part_inputs = num_inputs // tile.splits
    launch(
        _product_kernel,
        (num_outputs // tile.columns, tile.splits, -(-num_rows // tile.rows)),
        (output, x, weight, bias),
        (num_rows,),
        (
            num_outputs,
            num_inputs,
            tile.splits,
            gated,
            tile.rows,
            tile.columns,
            tile.depth,
            min(PREFETCHED, part_inputs),
            next_power_of_2(min(PREFETCHED, part_inputs)),
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return output


@cache
def _is_hopper(device: int) -> bool:
    return device >= 0 and torch.cuda.get_device_capability(device) == (9, 0)


@lru_cache(maxsize=4096)
def choose_tile(
    num_rows: int, num_outputs: int, num_inputs: int, *, gated: bool, split: bool
) -> Tile | None:
    """The tile of a product, None where none divides the weight or where cuBLAS is faster.

    The fastest of those that `benchmarks/gpu/layers_check.py` has measured on an H200. A weight
    that is not small is bound by bandwidth in any tile, and by cuBLAS's better ones as rows get
    many.
    """
    # Tried in whole steps of 8B at 256 rows, with tiles read through TMA: 15.95 to 16.58 ms, where
    # cuBLAS takes 15.96 to 16.05 ms. Programmatic launch of cuBLAS products gained nothing
    # either: 29.4 to 29.0 us a layer (benchmarks/README.md).
    is_small = num_outputs * num_inputs <= SMALL_WEIGHT
    outputs = num_outputs // 2 if gated else num_outputs
    if num_rows <= FEW_ROWS:
        tile = Tile(64, 32, 128, 1, 4, 4 if gated else 6)
        if not is_small and not gated:
            tile = Tile(64, 64, 128, 1, 4, 4)
    elif not is_small or num_rows > MAX_ROWS:
        return None
    else:
        tile = Tile(64, 64, 128, 1, 4, 4) if num_rows <= 128 else Tile(128, 64, 64, 1, 8, 5)
    if outputs % tile.columns or num_inputs % tile.depth:
        return None
    tiles = outputs // tile.columns * -(-num_rows // tile.rows)
    shares = {
        n: _share_at_work(n * tiles)
        for n in range(1, MAX_SPLITS + 1 if split else 2)
        if num_inputs % (n * tile.depth) == 0
    }
    splits = max(shares, key=shares.__getitem__)  # the fewest of equally good ones
    return tile._replace(splits=splits) if shares[splits] >= MIN_SHARE else None


def _share_at_work(programs: int) -> float:
    """Share of busy multiprocessors if each runs one program after the other."""
    return programs / (-(-programs // MULTIPROCESSORS) * MULTIPROCESSORS)


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    output_ptr: tl.tensor,
    x_ptr: tl.tensor,
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
    PREFETCHED: tl.constexpr,
    PREFETCH_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """y = x @ weight.T, float32 parts [SPLITS, T, N] of it, or silu(first half) * second half."""
    part_inputs: tl.constexpr = INPUTS // SPLITS
    split = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    weight_ptr += column[:, None] * INPUTS + split * part_inputs
    if OVERLAP:
        gdc_launch_dependents()
        line = tl.minimum(tl.arange(0, PREFETCH_BLOCK // LINE), PREFETCHED // LINE - 1)
        _prefetch(weight_ptr + line[None, :] * LINE)
        if GATED:
            _prefetch(weight_ptr + OUTPUTS * INPUTS + line[None, :] * LINE)
        gdc_wait()
    depth = tl.arange(0, DEPTH)
    x_ptr += row[:, None] * INPUTS + split * part_inputs + depth[None, :]
    weight_ptr += depth[None, :]
    mask = (row < num_rows)[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    up_total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, part_inputs, DEPTH):
        x = tl.load(x_ptr + start, mask=mask, other=0.0)
        total = tl.dot(x, tl.load(weight_ptr + start).T, total)
        if GATED:
            up_weight = tl.load(weight_ptr + OUTPUTS * INPUTS + start)
            up_total = tl.dot(x, up_weight.T, up_total)
    if GATED:
        total = gated_product(total, up_total, x_ptr.dtype.element_ty)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column).to(tl.float32)[None, :]
    row_at = (split * num_rows + row) * OUTPUTS
    tl.store(output_ptr + row_at[:, None] + column[None, :], total, mask=mask)


@triton.jit
def gated_product(gate: tl.tensor, up: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """silu(gate) * up of float32 sums, each rounded to `dtype` where transformers rounds it."""
    gate = gate.to(dtype).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return activated * up.to(dtype).to(tl.float32)


@triton.jit
def _prefetch(ptr: tl.tensor) -> None:
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [ptr.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
