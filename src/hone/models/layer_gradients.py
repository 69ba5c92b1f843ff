"""The operations of `hone.models.layer_kernels` with gradients, by Triton kernels as well.

Forward runs those very kernels, so a trainer has the bits of an engine. Backward computes in
float32 and rounds once, at the end; the gradient of a norm's weight is summed in float32, first by
each program over its rows, then over programs.

Letters: T tokens, D width of a row or head, H heads, I the MLP's inner size, P programs. This
module imports triton; `hone.models.exact_decoder` imports it only where it is used.
"""
# A launch passes plain numbers for constexpr parameters and takes `num_warps`, which the types of
# triton do not know; kernels take their pointers by position, some of which may be None.
# pyright: reportArgumentType=false, reportCallIssue=false, reportUnnecessaryComparison=false
# ruff: noqa: PLR0917

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.models import layer_kernels

__all__ = ["rms_norm", "rotate_heads", "silu_mul"]

NORM_PROGRAMS = 1056
"""Eight for each multiprocessor of the largest Hopper GPU."""
HEAD_PROGRAMS = 64
"""For each head."""
HEAD_TOKENS = 16
SILU_BLOCK = 1024


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
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    num_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`layer_kernels.rotate_heads` of heads that belong to no cache, leaving qkv as it is."""
    return _RotateHeads.apply(qkv, positions, rotary, q_norm, k_norm, eps, num_heads)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return layer_kernels.rms_norm(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        num_rows, width = x.shape
        num_programs = min(num_rows, NORM_PROGRAMS)
        grad_x = torch.empty_like(x)
        parts_PD = x.new_empty((num_programs, width), dtype=torch.float32)
        block = triton.next_power_of_2(width)
        _norm_gradient_kernel[(num_programs,)](
            grad_x,
            parts_PD,
            x,
            weight,
            grads[0].contiguous(),
            num_rows,
            ctx.eps,
            WIDTH=width,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )
        return grad_x, parts_PD.sum(0).to(weight.dtype), None


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return layer_kernels.silu_mul(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        gradient = torch.empty_like(gate_up)
        _silu_gradient_kernel[(num_rows, triton.cdiv(width, SILU_BLOCK))](
            gradient, gate_up, grads[0].contiguous(), WIDTH=width, BLOCK=SILU_BLOCK, num_warps=4
        )
        return gradient


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
        ctx.eps, ctx.num_heads = eps, num_heads
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
        num_heads: int = ctx.num_heads
        num_tokens, num_all_heads, head_dim = qkv.shape
        num_kv_heads = (num_all_heads - num_heads) // 2
        grad_qkv = torch.empty_like(qkv)
        num_programs = min(triton.cdiv(num_tokens, HEAD_TOKENS), HEAD_PROGRAMS)
        shape = (num_programs, num_heads + num_kv_heads, head_dim)
        parts_PHD = qkv.new_empty(() if q_norm is None else shape, dtype=torch.float32)
        _rotate_gradient_kernel[(num_programs, num_all_heads)](
            grad_qkv,
            parts_PHD,
            qkv,
            *(gradient.contiguous() for gradient in grads),
            positions,
            rotary,
            q_norm,
            k_norm,
            num_tokens,
            ctx.eps,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            TOKENS=HEAD_TOKENS,
            BLOCK=triton.next_power_of_2(head_dim // 2),
            num_warps=4,
        )
        if q_norm is None:
            return grad_qkv, None, None, None, None, None, None
        total_HD = parts_PHD.sum(0)
        of_q, of_k = (
            heads.sum(0).to(q_norm.dtype) for heads in total_HD.split((num_heads, num_kv_heads))
        )
        return grad_qkv, None, None, of_q, of_k, None, None


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
    BLOCK: tl.constexpr,
) -> None:
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        at = (tl.full([], 0, tl.int64) + row) * WIDTH + column
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
        normed = x * inverse
        total += grad * normed
        grad *= weight
        mean = tl.sum(grad * normed, 0) / WIDTH
        tl.store(grad_x_ptr + at, inverse * (grad - normed * mean), mask=mask)
    tl.store(parts_ptr + tl.program_id(0) * WIDTH + column, total, mask=mask)


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
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One head of every P-th group of tokens: what `_rotate_kernel` did to it, backwards."""
    half: tl.constexpr = HEAD_DIM // 2
    HEADS: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    head, dim = tl.program_id(1), tl.arange(0, BLOCK)
    in_head = dim < half
    grad_ptr = grad_v_ptr
    if head < NUM_HEADS:
        grad_ptr = grad_q_ptr
    elif head < HEADS:
        grad_ptr = grad_k_ptr
    num_heads = tl.where(head < NUM_HEADS, NUM_HEADS, NUM_KV_HEADS)
    first_head = tl.where(head < NUM_HEADS, 0, tl.where(head < HEADS, NUM_HEADS, HEADS))
    if q_norm_ptr is not None:
        norm_ptr = k_norm_ptr
        if head < NUM_HEADS:
            norm_ptr = q_norm_ptr
        first_weight = tl.load(norm_ptr + dim, mask=in_head, other=0.0).to(tl.float32)
        second_weight = tl.load(norm_ptr + half + dim, mask=in_head, other=0.0).to(tl.float32)
        first_total = tl.zeros([BLOCK], tl.float32)
        second_total = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.program_id(0) * TOKENS, num_tokens, tl.num_programs(0) * TOKENS):
        token = (start + tl.arange(0, TOKENS)).to(tl.int64)
        inside = token < num_tokens
        mask = inside[:, None] & in_head[None, :]
        at = (token * num_heads + head - first_head)[:, None] * HEAD_DIM + dim[None, :]
        first = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(grad_ptr + at + half, mask=mask, other=0.0).to(tl.float32)
        at = (token * (HEADS + NUM_KV_HEADS) + head)[:, None] * HEAD_DIM + dim[None, :]
        if head < HEADS:
            position = tl.load(positions_ptr + token, mask=inside, other=0)
            angle = position[:, None] * HEAD_DIM + dim[None, :]
            cos = tl.load(rotary_ptr + angle, mask=mask, other=0.0).to(tl.float32)
            sin = tl.load(rotary_ptr + angle + half, mask=mask, other=0.0).to(tl.float32)
            first, second = first * cos + second * sin, second * cos - first * sin
            if q_norm_ptr is not None:
                x = tl.load(qkv_ptr + at, mask=mask, other=0.0).to(tl.float32)
                y = tl.load(qkv_ptr + at + half, mask=mask, other=0.0).to(tl.float32)
                inverse = tl.rsqrt(tl.sum(x * x + y * y, 1) / HEAD_DIM + eps)[:, None]
                x, y = x * inverse, y * inverse
                first_total += tl.sum(first * x, 0)
                second_total += tl.sum(second * y, 0)
                first, second = first * first_weight[None, :], second * second_weight[None, :]
                mean = (tl.sum(first * x + second * y, 1) / HEAD_DIM)[:, None]
                first, second = inverse * (first - x * mean), inverse * (second - y * mean)
        tl.store(gradient_ptr + at, first, mask=mask)
        tl.store(gradient_ptr + at + half, second, mask=mask)
    if q_norm_ptr is not None:  # noqa: SIM102  # known when compiling, unlike the next
        if head < HEADS:
            part_ptr = parts_ptr + (tl.program_id(0) * HEADS + head) * HEAD_DIM + dim
            tl.store(part_ptr, first_total, mask=in_head)
            tl.store(part_ptr + half, second_total, mask=in_head)
