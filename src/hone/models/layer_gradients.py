"""What a decoder layer that is trained in exact mode runs between its matrix products.

These are operations of `hone.models.layer_kernels` that autograd knows: forward runs those very
kernels, so a trainer has the bits of an engine, backward Triton kernels of this module.

Backward computes in float32 and rounds once, at the end.
The gradient of a norm's weight is summed in float32, first by each program over its rows, then over
programs, so it has the same bits in every run.

Letters: T tokens, D width of a row or head, H heads, I the MLP's inner size, P programs. This
module imports triton; others import it only where it is used.
"""
# A launch passes plain numbers for constexpr parameters and takes `num_warps`, which the types of
# triton do not know; kernels take their pointers by position, some of which may be None.
# pyright: reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportUnnecessaryComparison=false
# pyright: reportAttributeAccessIssue=false
# ruff: noqa: PLR0917

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.models import layer_kernels

__all__ = ["rms_norm", "rotate_heads", "silu_mul"]

PROGRAMS = 1056
"""Of a kernel that sums over tokens: eight for each multiprocessor of the largest Hopper GPU."""
NORM_TILE = 4096
"""Numbers that a program norms at a time: several rows, where they are short."""
NORM_WARPS = 8
SILU_BLOCK = 1024
ROTATE_ROWS = 32
"""Heads that a program takes at a time."""


class NormGradients(NamedTuple):
    """Of a norm's input [T, D], and of its weight [D] in float32."""

    x: Tensor
    weight: Tensor


class HeadGradients(NamedTuple):
    """Of qkv [T, H, D], and of the norms' weights, [D] in float32 each, if there are any."""

    qkv: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rows of x [T, D], contiguous, over their root mean square, times weight [D]."""
    return _Norm.apply(x, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up [T, 2 I], contiguous, whose rows hold gate and up: [T, I]."""
    return _SiluMul.apply(gate_up)


def rotate_heads(
    qkv: Tensor,
    positions: Tensor,
    rotary: Tensor,
    *,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    num_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`layer_kernels.rotate_heads` of heads that belong to no cache, leaving qkv as it is."""
    return _RotateHeads.apply(qkv, positions, rotary, q_norm, k_norm, eps, num_heads)


def norm_gradients(x: Tensor, weight: Tensor, grad: Tensor, eps: float) -> NormGradients:
    """Gradients of the norm of x [T, D] with weight [D], given that of its result [T, D]. All
    contiguous."""
    num_rows, width = x.shape
    block = triton.next_power_of_2(width)
    rows = _norm_rows(block)
    num_programs = min(triton.cdiv(num_rows, rows), PROGRAMS)
    grad_x = torch.empty_like(x)
    parts_PD = x.new_empty((num_programs, width), dtype=torch.float32)
    _norm_gradient_kernel[(num_programs,)](
        grad_x,
        parts_PD,
        x,
        weight,
        grad,
        num_rows,
        eps,
        WIDTH=width,
        ROWS=rows,
        BLOCK=block,
        num_warps=NORM_WARPS,
    )
    return NormGradients(grad_x, parts_PD.sum(0))


def silu_gradients(gate_up: Tensor, grad: Tensor) -> Tensor:
    """Gradient of `silu_mul` of gate_up [T, 2 I], given that of its result [T, I]. All
    contiguous."""
    num_rows, width = grad.shape
    gradient = torch.empty_like(gate_up)
    _silu_gradient_kernel[(num_rows, triton.cdiv(width, SILU_BLOCK))](
        gradient, gate_up, grad, WIDTH=width, BLOCK=SILU_BLOCK, num_warps=4
    )
    return gradient


def rotate_gradients(
    qkv: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    positions: Tensor,
    rotary: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> HeadGradients:
    """Gradients of `rotate_heads` of qkv, given those of queries [T, Hq, D], keys and values
    [T, Hkv, D]."""
    grad_q, grad_k, grad_v = (grad.contiguous() for grad in grads)
    num_tokens, num_heads, head_dim = grad_q.shape
    num_kv_heads = grad_k.shape[1]
    num_all_heads = num_heads + 2 * num_kv_heads
    num_programs = min(triton.cdiv(num_tokens * num_all_heads, ROTATE_ROWS), PROGRAMS)
    grad_qkv = grad_q.new_empty(num_tokens, num_all_heads, head_dim)
    has_norms = q_norm is not None
    parts_P2D = grad_q.new_empty(
        (num_programs, 2, head_dim) if has_norms else (), dtype=torch.float32
    )
    _rotate_gradient_kernel[(num_programs,)](
        grad_qkv,
        parts_P2D,
        qkv,
        grad_q,
        grad_k,
        grad_v,
        positions,
        rotary,
        q_norm,
        k_norm,
        num_tokens,
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROWS=ROTATE_ROWS,
        BLOCK=triton.next_power_of_2(head_dim // 2),
        num_warps=4,
    )
    if not has_norms:
        return HeadGradients(grad_qkv, None, None)
    return HeadGradients(grad_qkv, *parts_P2D.sum(0).unbind())


def _norm_rows(block: int) -> int:
    return max(NORM_TILE // block, 1)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return layer_kernels.rms_norm(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        found = norm_gradients(x, weight, grads[0].contiguous(), ctx.eps)
        return found.x, found.weight.to(weight.dtype), None


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return layer_kernels.silu_mul(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return silu_gradients(gate_up, grads[0].contiguous())


class _RotateHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        positions: Tensor,
        rotary: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        num_heads: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(qkv, positions, rotary, q_norm, k_norm)
        ctx.eps = eps
        return layer_kernels.rotate_heads(
            qkv.clone(),
            positions,
            rotary,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            num_heads=num_heads,
            kv_cache=None,
            slot_mapping=None,
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, positions, rotary, q_norm, k_norm = ctx.saved_tensors
        grad_q, grad_k, grad_v = grads
        found = rotate_gradients(
            qkv, (grad_q, grad_k, grad_v), positions, rotary, q_norm, k_norm, ctx.eps
        )
        of_norms = (
            None if grad is None else grad.to(qkv.dtype) for grad in (found.q_norm, found.k_norm)
        )
        return found.qkv, None, None, *of_norms, None, None


@triton.jit(do_not_specialize=["num_rows", "eps"])
def _norm_gradient_kernel(
    grad_x_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    num_rows: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    column = tl.arange(0, BLOCK)
    in_row = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=in_row, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < num_rows)[:, None] & in_row[None, :]
        at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
        normed = x * inverse
        total += tl.sum(grad * normed, 0)
        grad *= weight
        mean = (tl.sum(grad * normed, 1) / WIDTH)[:, None]
        tl.store(grad_x_ptr + at, inverse * (grad - normed * mean), mask=mask)
    tl.store(parts_ptr + tl.program_id(0) * WIDTH + column, total, mask=in_row)


@triton.jit
def _silu_gradient_kernel(
    gradient_ptr: tl.tensor,
    gate_up_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    at = row * (2 * WIDTH) + column
    gate = tl.load(gate_up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + WIDTH, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    slope = share * (1.0 + gate * (1.0 - share))
    tl.store(gradient_ptr + at, grad * up * slope, mask=mask)
    tl.store(gradient_ptr + at + WIDTH, grad * gate * share, mask=mask)


# A row of the kernel below is one head of one token.


@triton.jit(do_not_specialize=["num_tokens", "eps"])
def _rotate_gradient_kernel(
    gradient_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    qkv_ptr: tl.tensor,
    grad_q_ptr: tl.tensor,
    grad_k_ptr: tl.tensor,
    grad_v_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    rotary_ptr: tl.tensor,
    q_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
    num_tokens: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    half: tl.constexpr = HEAD_DIM // 2
    ROTATED: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    HEADS: tl.constexpr = ROTATED + NUM_KV_HEADS
    dim = tl.arange(0, BLOCK)
    in_head = dim < half
    if q_norm_ptr is not None:
        first_of_q = tl.zeros([BLOCK], tl.float32)
        second_of_q = tl.zeros([BLOCK], tl.float32)
        first_of_k = tl.zeros([BLOCK], tl.float32)
        second_of_k = tl.zeros([BLOCK], tl.float32)
    num_rows = num_tokens.to(tl.int64) * HEADS
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    for start in range(first_row, num_rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        token, head = row // HEADS, row % HEADS
        inside = token < num_tokens
        is_query = inside & (head < NUM_HEADS)
        is_key = inside & (head >= NUM_HEADS) & (head < ROTATED)
        # One of the three is read, the others are masked and zero.
        at = token * NUM_HEADS + head
        first, second = _load_heads(grad_q_ptr, at, is_query, HEAD_DIM, BLOCK)
        at = token * NUM_KV_HEADS + head - NUM_HEADS
        first_of_key, second_of_key = _load_heads(grad_k_ptr, at, is_key, HEAD_DIM, BLOCK)
        at -= NUM_KV_HEADS
        first_of_value, second_of_value = _load_heads(
            grad_v_ptr, at, inside & (head >= ROTATED), HEAD_DIM, BLOCK
        )
        first, second = first + first_of_key, second + second_of_key

        position = tl.load(positions_ptr + token, mask=inside, other=0)
        cos, sin = _load_heads(rotary_ptr, position, inside, HEAD_DIM, BLOCK)
        first, second = first * cos + second * sin, second * cos - first * sin
        if q_norm_ptr is not None:
            choice = is_query[:, None]
            x, y = _load_heads(qkv_ptr, row, is_query | is_key, HEAD_DIM, BLOCK)
            inverse = tl.rsqrt(tl.sum(x * x + y * y, 1) / HEAD_DIM + eps)[:, None]
            x, y = x * inverse, y * inverse
            # What is not a query here is a key or zero.
            first_of_q += tl.sum(tl.where(choice, first * x, 0.0), 0)
            second_of_q += tl.sum(tl.where(choice, second * y, 0.0), 0)
            first_of_k += tl.sum(tl.where(choice, 0.0, first * x), 0)
            second_of_k += tl.sum(tl.where(choice, 0.0, second * y), 0)
            first *= _head_weight(q_norm_ptr, k_norm_ptr, dim, half, choice)
            second *= _head_weight(q_norm_ptr + half, k_norm_ptr + half, dim, half, choice)
            mean = (tl.sum(first * x + second * y, 1) / HEAD_DIM)[:, None]
            first, second = inverse * (first - x * mean), inverse * (second - y * mean)
        mask = inside[:, None] & in_head[None, :]
        at = row[:, None] * HEAD_DIM + dim[None, :]
        tl.store(gradient_ptr + at, first + first_of_value, mask=mask)
        tl.store(gradient_ptr + at + half, second + second_of_value, mask=mask)
    if q_norm_ptr is not None:
        part_ptr = parts_ptr + tl.program_id(0) * (2 * HEAD_DIM) + dim
        tl.store(part_ptr, first_of_q, mask=in_head)
        tl.store(part_ptr + half, second_of_q, mask=in_head)
        tl.store(part_ptr + HEAD_DIM, first_of_k, mask=in_head)
        tl.store(part_ptr + HEAD_DIM + half, second_of_k, mask=in_head)


@triton.jit
def _load_heads(
    ptr: tl.tensor, row: tl.tensor, mask: tl.tensor, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Both halves of rows of HEAD_DIM numbers, in float32; zero where masked."""
    half: tl.constexpr = HEAD_DIM // 2
    dim = tl.arange(0, BLOCK)
    inside = mask[:, None] & (dim < half)[None, :]
    at = row[:, None] * HEAD_DIM + dim[None, :]
    first = tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)
    return first, tl.load(ptr + at + half, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _head_weight(
    q_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
    dim: tl.tensor,
    half: tl.constexpr,
    is_query: tl.tensor,
) -> tl.tensor:
    of_q = tl.load(q_norm_ptr + dim, mask=dim < half, other=0.0).to(tl.float32)
    of_k = tl.load(k_norm_ptr + dim, mask=dim < half, other=0.0).to(tl.float32)
    return tl.where(is_query, of_q[None, :], of_k[None, :])
