"""The products of a decode step's experts with weights of 8-bit codes.

They take the place of kernels of `hone.models.expert_kernels`, which launches them. The rows that
they read, tokens and then what lies between both products, are integers in two planes, as in
`hone.models.int8_kernels`, which says why.

This module imports triton; `hone.models.expert_kernels` imports it.
"""
# A launch passes plain numbers for constexpr parameters and takes `num_warps`, which the types of
# triton do not know.
# pyright: reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportUnnecessaryComparison=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# ruff: noqa: PLR0917

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hone.families.shape import ROW_TAIL_BYTES
from hone.models.int8_kernels import join_planes, row_scale

__all__ = ["int8_down", "int8_gate_up"]

TAIL_BYTES = tl.constexpr(ROW_TAIL_BYTES)


@triton.jit(do_not_specialize=["num_tokens"])
def int8_gate_up(
    inner_ptr: tl.tensor,
    planes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    num_tokens: tl.tensor,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """silu(gate) * up of a block of an expert's tokens, into the rows of their pairs."""
    dtype: tl.constexpr = inner_ptr.dtype.element_ty
    width: tl.constexpr = INPUTS + TAIL_BYTES
    expert = tl.program_id(2).to(tl.int64)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mask = place < tl.load(counts_ptr + expert)
    if tl.program_id(0) * TOKENS < tl.load(counts_ptr + expert):
        pair = tl.load(pairs_ptr + expert * num_tokens + place, mask=mask, other=0).to(tl.int64)
        token = pair // PER_TOKEN
        scale = tl.load(scales_ptr + token, mask=mask, other=0.0)[None, :]
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)
        high_ptr = planes_ptr + token[:, None] * INPUTS + depth[None, :]
        low_ptr = high_ptr + num_tokens.to(tl.int64) * INPUTS
        weight_ptr += expert * 2 * OUTPUTS * width
        codes_ptr = weight_ptr + column[:, None] * width + depth[None, :]
        gate_high = tl.zeros([COLUMNS, TOKENS], tl.int32)
        gate_low = tl.zeros([COLUMNS, TOKENS], tl.int32)
        up_high = tl.zeros([COLUMNS, TOKENS], tl.int32)
        up_low = tl.zeros([COLUMNS, TOKENS], tl.int32)
        for start in range(0, INPUTS, DEPTH):
            high = tl.load(high_ptr + start, mask=mask[:, None], other=0).T
            low = tl.load(low_ptr + start, mask=mask[:, None], other=0).T
            gate_codes = tl.load(codes_ptr + start)
            gate_high = tl.dot(gate_codes, high, gate_high, out_dtype=tl.int32)
            gate_low = tl.dot(gate_codes, low, gate_low, out_dtype=tl.int32)
            up_codes = tl.load(codes_ptr + OUTPUTS * width + start)
            up_high = tl.dot(up_codes, high, up_high, out_dtype=tl.int32)
            up_low = tl.dot(up_codes, low, up_low, out_dtype=tl.int32)
        gate = join_planes(gate_high, gate_low)
        gate *= row_scale(weight_ptr, column, INPUTS)[:, None] * scale
        up = join_planes(up_high, up_low)
        up *= row_scale(weight_ptr, OUTPUTS + column, INPUTS)[:, None] * scale
        gate = gate.to(dtype).to(tl.float32)
        activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        product = (activated * up.to(dtype).to(tl.float32)).to(dtype)
        target_ptr = inner_ptr + pair[None, :] * OUTPUTS + column[:, None]
        tl.store(target_ptr, product, mask=mask[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def int8_down(
    parts_ptr: tl.tensor,
    planes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    num_tokens: tl.tensor,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """An expert's output for a block of its tokens times their gate weights, part k of T."""
    width: tl.constexpr = INPUTS + TAIL_BYTES
    expert = tl.program_id(2).to(tl.int64)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mask = place < tl.load(counts_ptr + expert)
    if tl.program_id(0) * TOKENS < tl.load(counts_ptr + expert):
        pair = tl.load(pairs_ptr + expert * num_tokens + place, mask=mask, other=0).to(tl.int64)
        scale = tl.load(scales_ptr + pair, mask=mask, other=0.0)
        scale *= tl.load(gates_ptr + pair, mask=mask, other=0.0)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)
        high_ptr = planes_ptr + pair[:, None] * INPUTS + depth[None, :]
        low_ptr = high_ptr + num_tokens.to(tl.int64) * PER_TOKEN * INPUTS
        weight_ptr += expert * OUTPUTS * width
        codes_ptr = weight_ptr + column[:, None] * width + depth[None, :]
        total_high = tl.zeros([COLUMNS, TOKENS], tl.int32)
        total_low = tl.zeros([COLUMNS, TOKENS], tl.int32)
        for start in range(0, INPUTS, DEPTH):
            high = tl.load(high_ptr + start, mask=mask[:, None], other=0).T
            low = tl.load(low_ptr + start, mask=mask[:, None], other=0).T
            codes = tl.load(codes_ptr + start)
            total_high = tl.dot(codes, high, total_high, out_dtype=tl.int32)
            total_low = tl.dot(codes, low, total_low, out_dtype=tl.int32)
        total = join_planes(total_high, total_low)
        total *= row_scale(weight_ptr, column, INPUTS)[:, None] * scale[None, :]
        row = (pair % PER_TOKEN) * num_tokens + pair // PER_TOKEN
        target_ptr = parts_ptr + row[None, :] * OUTPUTS + column[:, None]
        tl.store(target_ptr, total, mask=mask[None, :])
