"""Triton kernel that stores keys and values in pages.

This module imports triton; `hone.attention.backends` imports it only where it is used.
"""
# A launch passes plain numbers for constexpr parameters; kernels take their pointers by position.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportUnnecessaryComparison=false
# ruff: noqa: PLR0917

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["write_kv"]

FP8_MAX = tl.constexpr(448.0)


def write_kv(
    k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, scales: Tensor | None = None
) -> None:
    """Store k and v, [T, Hkv, D], at slots [T] of kv_cache; slot -1 stores nothing.

    kv_cache is [2, num_blocks, block_size, Hkv, D], contiguous. With `scales` [2, Hkv] float32 it
    is float8_e4m3fn: values are divided by their head's scale, and saturate. One kernel, no host
    wait.
    """
    num_tokens, num_heads, head_dim = k.shape
    assert kv_cache.is_contiguous()
    assert k.stride(2) == v.stride(2) == 1, f"{k.stride()=} {v.stride()=}"
    assert scales is None or scales.is_contiguous()
    _write_kernel[(num_tokens,)](
        k,
        v,
        kv_cache,
        slot_mapping,
        scales,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        kv_cache.stride(0),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK=triton.next_power_of_2(num_heads * head_dim),
    )


@triton.jit
def _write_kernel(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    values_offset: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        offset = tl.arange(0, BLOCK)
        mask = offset < NUM_HEADS * HEAD_DIM
        head, dim = offset // HEAD_DIM, offset % HEAD_DIM
        k = tl.load(k_ptr + token * k_token_stride + head * k_head_stride + dim, mask=mask)
        v = tl.load(v_ptr + token * v_token_stride + head * v_head_stride + dim, mask=mask)
        if scales_ptr is not None:
            k = _over(k, tl.load(scales_ptr + head, mask=mask, other=1.0))
            v = _over(v, tl.load(scales_ptr + NUM_HEADS + head, mask=mask, other=1.0))
        target = cache_ptr + slot * (NUM_HEADS * HEAD_DIM) + offset
        tl.store(target, k, mask=mask)
        tl.store(target + values_offset, v, mask=mask)


@triton.jit
def _over(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    return tl.clamp(x.to(tl.float32) / scale, -FP8_MAX, FP8_MAX)
