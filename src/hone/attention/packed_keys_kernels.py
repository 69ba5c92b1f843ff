"""Triton kernels of `hone.attention.packed_keys`. This module imports triton."""
# A launch passes plain numbers for constexpr parameters, which the types of triton do not know;
# kernels take their pointers by position.
# pyright: reportArgumentType=false, reportCallIssue=false
# ruff: noqa: PLR0917

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hone.attention.kernel_launch import launch, next_power_of_2

__all__ = ["gather", "sum_uses"]

TILE = 4096
"""Number of values that a program copies at a time."""


def gather(k: Tensor, v: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Gather k[index] and v[index], [K, H, D] and contiguous. k and v are [T, H, D] in any memory
    order with contiguous heads."""
    num_keys, (num_heads, head_dim) = len(index), k.shape[1:]
    k, v, strides = _by_heads(k, v)
    k_keys, v_keys = (x.new_empty(num_keys, num_heads, head_dim) for x in (k, v))
    width = next_power_of_2(num_heads * head_dim)
    keys = max(TILE // width, 1)
    launch(
        _gather_kernel,
        (-(-num_keys // keys), 1, 1),
        (k_keys, v_keys, k, v, index),
        (num_keys, *strides),
        (num_heads, head_dim, keys, width),
        num_warps=4,
    )
    return k_keys, v_keys


def _by_heads(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """k and v [T, H, D] with contiguous heads (copied if needed), and the strides of tokens and
    heads of each, in heads."""
    k, v = (x if _has_whole_heads(x) else x.contiguous() for x in (k, v))
    return k, v, tuple(stride // x.shape[2] for x in (k, v) for stride in x.stride()[:2])


def _has_whole_heads(x: Tensor) -> bool:
    """Whether each head of x [T, H, D] is contiguous, at a multiple of its size."""
    return x.stride(2) == 1 and not any(stride % x.shape[2] for stride in x.stride()[:2])


def sum_uses(grad_k: Tensor, grad_v: Tensor, uses: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Sum both gradients over each token's uses: over the keys `uses[starts[t]:starts[t + 1]]`, in
    float32.

    grad_k and grad_v are [K, H, D] in any memory order with contiguous heads. Returns [T, H, D] in
    their dtype, stored head by head, as compiled layers expect it.
    """
    grad_k, grad_v, strides = _by_heads(grad_k, grad_v)
    num_tokens, (num_heads, head_dim) = len(starts) - 1, grad_k.shape[1:]
    k_total, v_total = (x.new_empty(num_heads, num_tokens, head_dim) for x in (grad_k, grad_v))
    width = next_power_of_2(num_heads * head_dim)
    launch(
        _sum_kernel,
        (num_tokens, 1, 1),
        (k_total, v_total, grad_k, grad_v, uses, starts),
        (num_tokens, *strides),
        (num_heads, head_dim, width),
        num_warps=min(max(width // 256, 1), 8),
    )
    return k_total.transpose(0, 1), v_total.transpose(0, 1)


@triton.jit(do_not_specialize=["num_keys", "k_stride", "k_head", "v_stride", "v_head"])
def _gather_kernel(
    k_keys_ptr: tl.tensor,
    v_keys_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    index_ptr: tl.tensor,
    num_keys: tl.tensor,
    k_stride: tl.tensor,
    k_head: tl.tensor,
    v_stride: tl.tensor,
    v_head: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    is_key = key < num_keys
    token = tl.load(index_ptr + key, mask=is_key, other=0)[:, None]
    column = tl.arange(0, WIDTH)
    mask = is_key[:, None] & (column < HEADS * HEAD_DIM)[None, :]
    head = (column // HEAD_DIM).to(tl.int64)[None, :]
    in_head = (column % HEAD_DIM)[None, :]
    # Strides count heads, so that the compiler knows how far addresses are aligned.
    k_place = (token * k_stride + head * k_head) * HEAD_DIM + in_head
    v_place = (token * v_stride + head * v_head) * HEAD_DIM + in_head
    k = tl.load(k_ptr + k_place, mask=mask)
    v = tl.load(v_ptr + v_place, mask=mask)
    place = key.to(tl.int64)[:, None] * (HEADS * HEAD_DIM) + column[None, :]
    tl.store(k_keys_ptr + place, k, mask=mask)
    tl.store(v_keys_ptr + place, v, mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "k_stride", "k_head", "v_stride", "v_head"])
def _sum_kernel(
    k_total_ptr: tl.tensor,
    v_total_ptr: tl.tensor,
    k_grad_ptr: tl.tensor,
    v_grad_ptr: tl.tensor,
    uses_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    num_tokens: tl.tensor,
    k_stride: tl.tensor,
    k_head: tl.tensor,
    v_stride: tl.tensor,
    v_head: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    mask = column < HEADS * HEAD_DIM
    head = (column // HEAD_DIM).to(tl.int64)
    in_head = column % HEAD_DIM
    k_total = tl.zeros([WIDTH], tl.float32)
    v_total = tl.zeros([WIDTH], tl.float32)
    for number in range(tl.load(starts_ptr + token), tl.load(starts_ptr + token + 1)):
        use = tl.load(uses_ptr + number).to(tl.int64)
        # Strides count heads, so that the compiler knows how far addresses are aligned.
        k_place = (use * k_stride + head * k_head) * HEAD_DIM + in_head
        v_place = (use * v_stride + head * v_head) * HEAD_DIM + in_head
        k_total += tl.load(k_grad_ptr + k_place, mask=mask, other=0.0).to(tl.float32)
        v_total += tl.load(v_grad_ptr + v_place, mask=mask, other=0.0).to(tl.float32)
    place = (head * num_tokens + token) * HEAD_DIM + in_head
    tl.store(k_total_ptr + place, k_total, mask=mask)
    tl.store(v_total_ptr + place, v_total, mask=mask)
