"""Operations of a decoder layer in generation: products, and Triton kernels between them.

A decode step moves little data through them and waits mostly for their launches, so each does all
the work between two matrix products. They round exactly where the layers of transformers do: a norm
is computed in float32, rounded to the model's dtype, then multiplied by its weight; rotary
embeddings round both products before they add them; the gate is rounded before it multiplies.
Reference implementations in torch, with the same arguments, are `TorchKernels` of
`hone.models.layer_ops`.

On Hopper GPUs a launch is prepared while the kernel before it still runs, and waits within the
kernel until that one's results are visible (programmatic dependent launch, CUDA Programming Guide).

This module imports triton; `hone.models.layer_ops` imports it only where it is used.
"""
# A launch passes plain numbers for constexpr parameters and takes `num_warps`, which the types of
# triton do not know; kernels take their pointers by position, some of which may be None.
# pyright: reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportUnnecessaryComparison=false
# pyright: reportGeneralTypeIssues=false
# ruff: noqa: PLR0917

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hone.attention.context import PagedContext
from hone.attention.kernel_launch import launch, next_power_of_2
from hone.attention.recurrent import decode_kernel, delta_net
from hone.attention.recurrent.delta_net import DeltaNet
from hone.models import expert_kernels, experts
from hone.models.int8_kernels import int8_product, unpack_rows
from hone.models.int8_rows import is_packed
from hone.models.product_kernels import gated_product, small_product

__all__ = [
    "add_rms_norm",
    "gate_heads",
    "gated_linear",
    "linear",
    "mix_heads",
    "rms_norm",
    "rotate_heads",
    "silu_mul",
    "sum_experts",
    "sum_linear",
]

NORM_ELEMENTS_PER_WARP = 512
"""A row of 1024 takes 2 warps, one of 4096 takes 8: 16 elements a thread, two wide loads."""
HEADS_PER_PROGRAM = 8
ROTATE_WARPS = 4
SILU_BLOCK = 1024
SILU_WARPS = 4
FP8_MAX = tl.constexpr(448.0)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K] @ weight [N, K].T + bias [N], all contiguous, as [T, N]. The weight may be packed
    (`hone.models.int8_rows`)."""
    product = _small_product(weight)(x, weight, bias)
    return _large_product(x, weight, bias) if product is None else product


def sum_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` for `add_rms_norm`, which also accepts a tensor of partial sums."""
    product = _small_product(weight)(x, weight, bias, split=True)
    return _large_product(x, weight, bias) if product is None else product


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`silu_mul` of `linear`."""
    if bias is not None:
        return silu_mul(linear(x, weight, bias))
    product = _small_product(weight)(x, weight, gated=True)
    return silu_mul(_large_product(x, weight, None)) if product is None else product


def _small_product(weight: Tensor) -> Callable[..., Tensor | None]:
    return int8_product if is_packed(weight) else small_product


def _large_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, unpack_rows(weight, x.dtype) if is_packed(weight) else weight, bias)


def sum_experts(
    x: Tensor,
    mixture: experts.Experts,
    beside: Tensor | None = None,
    record: experts.Record = None,
) -> Tensor:
    """Sum of the outputs of each token's experts for x [T, D], contiguous, and of `beside` [T, D]
    if given, in a form for `add_rms_norm`."""
    if expert_kernels.is_served(x, mixture):
        logits = experts.router_logits(x, mixture, linear)
        return expert_kernels.sum_parts(x, logits, mixture, beside=beside, record=record)
    total = experts.sum_experts(x, mixture, record, unpack=unpack_rows)
    return total if beside is None else total + beside


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centred: bool = False) -> Tensor:
    """Rows of x [T, D], contiguous, over their root mean square, times weight [D], or 1 + weight
    where it is `zero_centred`."""
    return _norm(x, None, weight, eps, zero_centred=zero_centred)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centred: bool = False
) -> Tensor:
    """Add x to residual in place, both [T, D] and contiguous; the sum, normed as by `rms_norm`, as
    a new tensor.

    x may also be float32 [S, T, D], parts of a sum that are added in order and rounded first.
    """
    return _norm(residual, x, weight, eps, zero_centred=zero_centred)


def _norm(
    residual: Tensor, x: Tensor | None, weight: Tensor, eps: float, *, zero_centred: bool
) -> Tensor:
    num_rows, width = residual.shape
    block = next_power_of_2(width)
    output = torch.empty_like(residual)
    num_parts = len(x) if x is not None and x.ndim > 2 else 1
    launch(
        _norm_kernel,
        (num_rows, 1, 1),
        (output, residual, x, weight),
        (num_rows, eps),
        (zero_centred, width, block, num_parts),
        num_warps=min(max(block // NORM_ELEMENTS_PER_WARP, 1), 16),
    )
    return output


def rotate_heads(
    qkv: Tensor,
    positions: Tensor,
    rotary: Tensor,
    *,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    num_heads: int,
    kv_cache: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    kv_scales: Tensor | None = None,
    zero_centred: bool = False,
    gated: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm and rotate queries and keys; store keys and values where a cache is given.

    qkv [T, Hq + 2 Hkv, D] holds queries, keys and values, contiguous, and is overwritten. Token t
    is at positions[t] (int64 [T]), a row of rotary [P, R] in the dtype of qkv: R / 2 cosines, then
    R / 2 sines, which rotate pairs (i, i + R / 2); what a head has behind R stays. q_norm and
    k_norm [D], if any, are the weights of a norm over each head, as of `rms_norm`. `gated` heads
    have qkv [T, 2 Hq + 2 Hkv, D], in which a gate follows each query. kv_cache is [2, num_blocks,
    block_size, Hkv, D] or None, slot_mapping [T] int64, slot -1 stores nothing. The cache has the
    dtype of qkv or, with kv_scales [2, Hkv] float32, is float8_e4m3fn: values are divided by their
    head's scale, and saturate. Returns queries [T, Hq, D], contiguous, keys and values [T, Hkv, D].
    """
    num_tokens, num_all_heads, head_dim = qkv.shape
    num_rows = 2 * num_heads if gated else num_heads
    num_kv_heads = (num_all_heads - num_rows) // 2
    q = qkv.new_empty(num_tokens, num_heads, head_dim)
    heads = HEADS_PER_PROGRAM
    launch(
        _rotate_kernel,
        (num_tokens, -(-num_heads // heads) - (-num_kv_heads // heads), 1),
        (q, qkv, positions, rotary, q_norm, k_norm, kv_cache, slot_mapping, kv_scales),
        (0 if kv_cache is None else kv_cache.shape[1] * kv_cache.shape[2], eps),
        (
            zero_centred,
            num_rows // num_heads,
            num_heads,
            num_kv_heads,
            head_dim,
            rotary.shape[1],
            heads,
            next_power_of_2(head_dim // 2),
        ),
        num_warps=ROTATE_WARPS,
    )
    _, k, v = qkv.split_with_sizes((num_rows, num_kv_heads, num_kv_heads), 1)
    return q, k, v


def gate_heads(x: Tensor, qkv: Tensor) -> Tensor:
    """x [T, Hq, D] times the sigmoid of the gates in qkv [T, 2 Hq + 2 Hkv, D], both contiguous, in
    which a gate follows each query: [T, Hq, D]."""
    num_tokens, num_heads, head_dim = x.shape
    output = torch.empty_like(x)
    launch(
        _gate_kernel,
        (num_tokens, -(-num_heads * head_dim // SILU_BLOCK), 1),
        (output, x, qkv),
        (),
        (num_heads * head_dim, qkv.shape[1] * head_dim, head_dim, SILU_BLOCK),
        num_warps=SILU_WARPS,
    )
    return output


def mix_heads(projected: Tensor, net: DeltaNet, context: PagedContext) -> Tensor:
    """`delta_net.mix_heads`, in one kernel where it decodes; projected is contiguous."""
    if context.is_decode and decode_kernel.is_served(net):
        return decode_kernel.mix_heads(projected, net, context)
    return delta_net.mix_heads(projected, net, context)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up [T, 2 I], contiguous, whose rows hold gate and up: [T, I]."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty(num_rows, width)
    launch(
        _silu_mul_kernel,
        (num_rows, -(-width // SILU_BLOCK), 1),
        (output, gate_up),
        (),
        (width, SILU_BLOCK),
        num_warps=SILU_WARPS,
    )
    return output


@triton.jit(do_not_specialize=["num_rows", "eps"])
def _norm_kernel(
    output_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    num_rows: tl.tensor,
    eps: tl.tensor,
    ZERO_CENTRED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    dtype: tl.constexpr = output_ptr.dtype.element_ty
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.load(residual_ptr + at, mask=mask, other=0.0)
    if x_ptr is not None:
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            part_ptr = x_ptr + part * num_rows.to(tl.int64) * WIDTH
            x += tl.load(part_ptr + at, mask=mask, other=0.0)
        total = _add(total, x.to(dtype), dtype)
        tl.store(residual_ptr + at, total, mask=mask)
    exact = total.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(exact * exact, axis=0) / WIDTH + eps)
    tl.store(output_ptr + at, _scale(exact, inverse, weight, ZERO_CENTRED, dtype), mask=mask)


@triton.jit(do_not_specialize=["num_slots", "eps"])
def _rotate_kernel(
    q_ptr: tl.tensor,
    qkv_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    rotary_ptr: tl.tensor,
    q_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    num_slots: tl.tensor,
    eps: tl.tensor,
    ZERO_CENTRED: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    # Values of a head come in pairs, the first of which is at `dim` and the second `apart` behind
    # it. Pairs of what is not rotated are turned by no angle. A query has QUERY_ROWS rows, of which
    # it is the first.
    half: tl.constexpr = HEAD_DIM // 2
    turned: tl.constexpr = ROTARY // 2
    query_blocks: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    qkv_ptr += token * ((QUERY_ROWS * NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    pair = tl.arange(0, BLOCK)
    in_head = pair < half
    dim = pair
    apart = tl.zeros([BLOCK], tl.int32) + half
    if ROTARY < HEAD_DIM:
        dim = tl.where(pair < turned, pair, pair + turned)
        apart = tl.where(pair < turned, turned, half - turned)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    rotary_ptr += tl.load(positions_ptr + token).to(tl.int64) * ROTARY + pair
    cos = tl.load(rotary_ptr, mask=pair < turned, other=1.0)[None, :]
    sin = tl.load(rotary_ptr + turned, mask=pair < turned, other=0.0)[None, :]
    if block < query_blocks:
        head = block * HEADS + tl.arange(0, HEADS)
        mask = (head < NUM_HEADS)[:, None] & in_head[None, :]
        at = head[:, None] * HEAD_DIM + dim[None, :]
        queries_ptr = qkv_ptr + head[:, None] * (QUERY_ROWS * HEAD_DIM) + dim[None, :]
        first, second = _norm_and_rotate(
            queries_ptr,
            mask,
            dim,
            apart,
            in_head,
            cos,
            sin,
            q_norm_ptr,
            eps,
            HEAD_DIM,
            ZERO_CENTRED,
        )
        q_ptr += token * (NUM_HEADS * HEAD_DIM)
        tl.store(q_ptr + at, first, mask=mask)
        tl.store(q_ptr + at + apart[None, :], second, mask=mask)
    else:
        head = (block - query_blocks) * HEADS + tl.arange(0, HEADS)
        mask = (head < NUM_KV_HEADS)[:, None] & in_head[None, :]
        at = head[:, None] * HEAD_DIM + dim[None, :]
        keys_ptr = qkv_ptr + QUERY_ROWS * NUM_HEADS * HEAD_DIM + at
        first, second = _norm_and_rotate(
            keys_ptr,
            mask,
            dim,
            apart,
            in_head,
            cos,
            sin,
            k_norm_ptr,
            eps,
            HEAD_DIM,
            ZERO_CENTRED,
        )
        tl.store(keys_ptr, first, mask=mask)
        tl.store(keys_ptr + apart[None, :], second, mask=mask)
        if cache_ptr is not None:
            slot = tl.load(slots_ptr + token).to(tl.int64)
            if slot >= 0:
                values_ptr = keys_ptr + NUM_KV_HEADS * HEAD_DIM
                first_value = tl.load(values_ptr, mask=mask, other=0.0)
                second_value = tl.load(values_ptr + apart[None, :], mask=mask, other=0.0)
                target = cache_ptr + slot * (NUM_KV_HEADS * HEAD_DIM) + at
                scale_at = tl.minimum(head, NUM_KV_HEADS - 1)[:, None]
                _store_scaled(target, first, scales_ptr, scale_at, mask)
                _store_scaled(target + apart[None, :], second, scales_ptr, scale_at, mask)
                target += num_slots.to(tl.int64) * (NUM_KV_HEADS * HEAD_DIM)
                scale_at += NUM_KV_HEADS
                _store_scaled(target, first_value, scales_ptr, scale_at, mask)
                _store_scaled(target + apart[None, :], second_value, scales_ptr, scale_at, mask)


@triton.jit
def _store_scaled(
    target_ptr: tl.tensor,
    x: tl.tensor,
    scales_ptr: tl.tensor,
    scale_at: tl.tensor,
    mask: tl.tensor,
) -> None:
    if scales_ptr is None:
        tl.store(target_ptr, x, mask=mask)
    else:
        scaled = x.to(tl.float32) / tl.load(scales_ptr + scale_at)
        tl.store(target_ptr, tl.clamp(scaled, -FP8_MAX, FP8_MAX), mask=mask)


@triton.jit
def _norm_and_rotate(
    heads_ptr: tl.tensor,
    mask: tl.tensor,
    dim: tl.tensor,
    apart: tl.tensor,
    in_head: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    norm_ptr: tl.tensor,
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    dtype: tl.constexpr = heads_ptr.dtype.element_ty
    first = tl.load(heads_ptr, mask=mask, other=0.0)
    second = tl.load(heads_ptr + apart[None, :], mask=mask, other=0.0)
    if norm_ptr is not None:
        x, y = first.to(tl.float32), second.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x + y * y, axis=1) / HEAD_DIM + eps)
        first_weight = tl.load(norm_ptr + dim, mask=in_head, other=0.0)
        second_weight = tl.load(norm_ptr + apart + dim, mask=in_head, other=0.0)
        first = _scale(x, inverse[:, None], first_weight[None, :], ZERO_CENTRED, dtype)
        second = _scale(y, inverse[:, None], second_weight[None, :], ZERO_CENTRED, dtype)
    return (
        _add(_multiply(first, cos, dtype), -_multiply(second, sin, dtype), dtype),
        _add(_multiply(second, cos, dtype), _multiply(first, sin, dtype), dtype),
    )


@triton.jit
def _silu_mul_kernel(
    output_ptr: tl.tensor,
    gate_up_ptr: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    dtype: tl.constexpr = output_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate_ptr = gate_up_ptr + row * (2 * WIDTH) + column
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_ptr, mask=mask, other=0.0)
    up = tl.load(gate_ptr + WIDTH, mask=mask, other=0.0)
    tl.store(output_ptr + row * WIDTH + column, gated_product(gate, up, dtype), mask=mask)


@triton.jit
def _gate_kernel(
    output_ptr: tl.tensor,
    x_ptr: tl.tensor,
    qkv_ptr: tl.tensor,
    WIDTH: tl.constexpr,
    QKV_WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    dtype: tl.constexpr = output_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    head, dim = column // HEAD_DIM, column % HEAD_DIM
    gate_ptr = qkv_ptr + row * QKV_WIDTH + (2 * head + 1) * HEAD_DIM + dim
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * WIDTH + column, mask=mask, other=0.0)
    share = (1.0 / (1.0 + tl.exp(-gate))).to(dtype)
    tl.store(output_ptr + row * WIDTH + column, _multiply(x, share, dtype), mask=mask)


# Arithmetic on values of `dtype` as torch does it: in float32, rounded after every operation.


@triton.jit
def _scale(
    x: tl.tensor,
    inverse: tl.tensor,
    weight: tl.tensor,
    zero_centred: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """A norm's last steps. A zero-centred one, of Qwen3.5, rounds once."""
    if zero_centred:
        scaled = ((x * inverse) * (1.0 + weight.to(tl.float32))).to(dtype)
    else:
        scaled = _multiply((x * inverse).to(dtype), weight, dtype)
    return scaled


@triton.jit
def _multiply(x: tl.tensor, y: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    return (x.to(tl.float32) * y.to(tl.float32)).to(dtype)


@triton.jit
def _add(x: tl.tensor, y: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    return (x.to(tl.float32) + y.to(tl.float32)).to(dtype)
