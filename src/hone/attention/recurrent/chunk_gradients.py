"""Gradients inside of the chunks of the gated delta rule, in one Triton kernel.

One kernel of `fla-core` is wrong where Triton from 3.4 to before 3.7.1 compiles it for Hopper GPUs,
and the package refuses to run it there (its issue 640); torch 2.11 brings Triton 3.6. This kernel
computes what that one would. Its loop is unrolled, so that no loads are moved between its products.
It is used with every GPU and Triton, so that one way is tested; it was measured on an H200 alone.

Of a chunk of L tokens with decays G (cumulated, in log), first state h and new values v, outputs
and last state are, with s = 1 / sqrt(K):

    o_i = s q_i (exp(G_i) h + sum_{j <= i} exp(G_i - G_j) k_j v_j^T)
    h'  = exp(G_L) h + sum_j exp(G_L - G_j) k_j v_j^T

and new values are v = u - w h. All terms with q_i have the factor exp(G_i), and all terms with k_j
the factor exp(-G_j), so the gradient of G_i is q_i . dq_i - k_i . dk_i. All of h' has the factor
exp(G_L), whose gradient h' . dh' comes to G_L.

Letters: T tokens, C chunks, Hk key heads, H value heads, K and V sizes of a head.

This module imports triton.
"""
# A launch passes plain numbers for constexpr parameters and takes `num_warps`, which the types of
# triton do not know; operators of `tl.tensor` are untyped.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: PLR0915, PLR0917

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from hone.attention.kernel_launch import launch, next_power_of_2
from hone.segments import CHUNK

__all__ = ["ChunkGradients", "ChunkInputs", "Tuning", "chunk_gradients"]


class ChunkInputs(NamedTuple):
    """Tokens of segments, end to end, and what their chunks begin and end with; all contiguous."""

    q: Tensor  # [T, Hk, K], normalised
    k: Tensor  # [T, Hk, K], normalised
    v: Tensor  # [T, H, V], new values
    do: Tensor  # [T, H, V], gradient of the output
    dv: Tensor  # [T, H, V], gradient of the new values, from outputs and later states
    log2_decays: Tensor  # [T, H] float32, cumulated from the first token of a chunk on
    h: Tensor  # [C, H, K, V], first state of a chunk
    dh: Tensor  # [C, H, K, V], gradient of its last state


class ChunkGradients(NamedTuple):
    """Gradients of the same tokens, each value head on its own."""

    dq: Tensor  # [T, H, K]
    dk: Tensor  # [T, H, K]
    dw: Tensor  # [T, H, K]
    dg: Tensor  # [T, H] float32, of the cumulated decays in natural log


class Tuning(NamedTuple):
    """Launch parameters of the kernel."""

    keys: int  # of a head that a program serves, a power of two
    values: int  # at a time, a power of two
    num_warps: int


TUNING = Tuning(64, 64, 4)


def chunk_gradients(
    inputs: ChunkInputs,
    cu_seqlens: Tensor,
    chunks: Tensor,
    scale: float,
    *,
    tuning: Tuning = TUNING,
) -> ChunkGradients:
    """Gradients inside of chunks of `CHUNK` tokens. `cu_seqlens` and `chunks` are those of a
    `SegmentPlan`. The host waits for nothing."""
    num_tokens, num_heads, value_dim = inputs.v.shape
    num_key_heads, key_dim = inputs.q.shape[1:]
    for name, tensor in zip(inputs._fields, inputs, strict=True):
        assert tensor.is_contiguous(), f"{name}: {tensor.shape=} {tensor.stride()=}"
    keys = min(tuning.keys, next_power_of_2(key_dim))
    values = min(tuning.values, next_power_of_2(value_dim))
    num_parts = -(-key_dim // keys)
    dq, dk, dw = (inputs.q.new_empty(num_tokens, num_heads, key_dim) for _ in range(3))
    dg = inputs.log2_decays.new_empty(num_parts, num_tokens, num_heads, dtype=torch.float32)
    launch(
        _chunk_kernel,
        (len(chunks), num_heads, num_parts),
        (dq, dk, dw, dg, *inputs, cu_seqlens, chunks),
        (num_tokens, scale),
        (
            num_heads,
            num_heads // num_key_heads,
            key_dim,
            value_dim,
            keys,
            values,
            CHUNK,
        ),
        num_warps=tuning.num_warps,
        num_stages=1,
    )
    return ChunkGradients(dq, dk, dw, dg.sum(0) if num_parts > 1 else dg[0])


@triton.jit(do_not_specialize=["num_tokens", "scale"])
def _chunk_kernel(
    dq_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dw_ptr: tl.tensor,
    dg_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    do_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    decays_ptr: tl.tensor,
    h_ptr: tl.tensor,
    dh_ptr: tl.tensor,
    borders_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    num_tokens: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    if OVERLAP:
        gdc_wait()
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.program_id(2)
    segment = tl.load(chunks_ptr + 2 * chunk)
    start = tl.load(borders_ptr + segment) + SIZE * tl.load(chunks_ptr + 2 * chunk + 1)
    last = tl.minimum(tl.load(borders_ptr + segment + 1) - start, SIZE) - 1
    number = tl.arange(0, SIZE)
    is_token = number <= last
    token = start + number
    keys = part * KEYS + tl.arange(0, KEYS)
    is_key = keys < KEY_DIM
    own = is_token[:, None] & is_key[None, :]

    decays = tl.load(decays_ptr + token * HEADS + head, mask=is_token, other=0.0)
    total = tl.load(decays_ptr + (start + last) * HEADS + head)
    of_keys = (token[:, None] * (HEADS // REPEATS) + head // REPEATS) * KEY_DIM + keys[None, :]
    q = tl.load(q_ptr + of_keys, mask=own, other=0.0)
    k = tl.load(k_ptr + of_keys, mask=own, other=0.0)

    scores = tl.zeros((SIZE, SIZE), tl.float32)
    dq = tl.zeros((SIZE, KEYS), tl.float32)
    dk = tl.zeros((SIZE, KEYS), tl.float32)
    dw = tl.zeros((SIZE, KEYS), tl.float32)
    of_states = 0.0
    for first in tl.static_range(0, VALUE_DIM, VALUES):
        values = first + tl.arange(0, VALUES)
        is_value = values < VALUE_DIM
        of_values = (token[:, None] * HEADS + head) * VALUE_DIM + values[None, :]
        is_here = is_token[:, None] & is_value[None, :]
        v = tl.load(v_ptr + of_values, mask=is_here, other=0.0)
        do = tl.load(do_ptr + of_values, mask=is_here, other=0.0)
        dv = tl.load(dv_ptr + of_values, mask=is_here, other=0.0)
        # Transposed: [VALUES, KEYS].
        of_state = ((chunk * HEADS + head) * KEY_DIM + keys[None, :]) * VALUE_DIM + values[:, None]
        in_state = is_key[None, :] & is_value[:, None]
        h = tl.load(h_ptr + of_state, mask=in_state, other=0.0)
        dh = tl.load(dh_ptr + of_state, mask=in_state, other=0.0)
        of_states += tl.sum(h.to(tl.float32) * dh.to(tl.float32))
        scores = tl.dot(do, tl.trans(v), scores)
        dq = tl.dot(do, h.to(do.dtype), dq)
        dk = tl.dot(v, dh.to(v.dtype), dk)
        dw = tl.dot(dv, h.to(dv.dtype), dw)

    seen = (number[:, None] >= number[None, :]) & is_token[:, None] & is_token[None, :]
    between = tl.exp2(tl.where(seen, decays[:, None] - decays[None, :], 0.0))
    scores = tl.where(seen, scores * between * scale, 0.0).to(k.dtype)
    dq = tl.dot(scores, k, dq * (tl.exp2(decays) * scale)[:, None])
    dk *= tl.where(is_token, tl.exp2(total - decays), 0.0)[:, None]
    of_end = tl.exp2(total) * of_states + tl.sum(dk * k.to(tl.float32))  # h' . dh'
    dk = tl.dot(tl.trans(scores), q, dk)
    dg = tl.sum(dq * q.to(tl.float32), 1) - tl.sum(dk * k.to(tl.float32), 1)
    dg += tl.where(number == last, of_end, 0.0)

    of_gradients = (token[:, None] * HEADS + head) * KEY_DIM + keys[None, :]
    tl.store(dq_ptr + of_gradients, dq.to(dq_ptr.dtype.element_ty), mask=own)
    tl.store(dk_ptr + of_gradients, dk.to(dk_ptr.dtype.element_ty), mask=own)
    tl.store(dw_ptr + of_gradients, (-dw).to(dw_ptr.dtype.element_ty), mask=own)
    of_part = part.to(tl.int64) * num_tokens * HEADS
    tl.store(dg_ptr + of_part + token * HEADS + head, dg, mask=is_token)
