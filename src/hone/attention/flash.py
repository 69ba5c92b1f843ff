"""Packed attention on CUDA through `torch.nn.attention.varlen.varlen_attn` (FlashAttention).

FlashAttention aligns its causal mask at the bottom right: with fewer queries than keys the queries
are a sequence's last tokens, which is what a chunked prefill needs.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from hone.attention.blocks import AttentionBlock
from hone.attention.context import PackedContext, PagedContext, borders_of
from hone.attention.reference import gather_kv
from hone.types import Spans

__all__ = [
    "MAX_HEAD_DIM",
    "attend_block",
    "block_gradients",
    "packed_attention",
    "prefill_attention",
    "span_attention",
]

MAX_HEAD_DIM = 256
"""Largest head size of the kernels."""

_ASKS_FOR_SHARED_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether several query heads share a key head only on request (torch 2.12 on) or always."""


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, context: PackedContext, *, scale: float, window: int | None
) -> Tensor:
    """Causal attention within each packed sequence, differentiable.

    q is [T, Hq, D], k and v [K, Hkv, D], of the context's keys where it has some, else of the T
    tokens; float16 or bfloat16. Returns [T, Hq, D].
    """
    keys = context.keys or context
    return _varlen(
        q,
        k,
        v,
        borders_q=context.cu_seqlens,
        borders_k=keys.cu_seqlens,
        max_q=context.max_seqlen,
        max_k=keys.max_seqlen,
        scale=scale,
        window=window,
    )


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    context: PagedContext,
    *,
    scale: float,
    scales: Tensor | None = None,
    window: int | None,
) -> Tensor:
    """Chunks of prompts, q [T, Hq, D], against all their keys.

    Without a cached prefix the keys are the chunk's own, k and v [T, Hkv, D]. With one, the chunk's
    own lie in the cache as well, and all are gathered from there, dequantised with scales [2, Hkv]
    where it is FP8. Returns [T, Hq, D].
    """
    borders_k = context.cu_seqlens_q
    if context.has_prefix:
        if context.stored_keys is None:  # some twenty small kernels, too many for every layer
            context.stored_keys = _stored_keys(context, block_size=kv_cache.shape[2])
        borders_k, slots = context.stored_keys
        flat = kv_cache.view(2, -1, *kv_cache.shape[3:])
        k, v = gather_kv(flat, 1, slots, scales, q.dtype).unbind(0)
    return _varlen(
        q,
        k,
        v,
        borders_q=context.cu_seqlens_q,
        borders_k=borders_k,
        max_q=context.max_seqlen_q,
        max_k=context.max_context_len,
        scale=scale,
        window=window,
    )


def span_attention(
    q: Tensor, k: Tensor, v: Tensor, spans: Spans, *, scale: float, window: int | None
) -> Tensor:
    """Attention of spans to all their keys, differentiable; q [Q, Hq, D], k and v [K, Hkv, D].
    Returns [Q, Hq, D]."""
    keys = spans.keys
    return _varlen(
        q,
        k,
        v,
        borders_q=spans.cu_seqlens,
        borders_k=keys.cu_seqlens,
        max_q=spans.max_seqlen,
        max_k=keys.max_seqlen,
        scale=scale,
        window=window,
        is_causal=False,
    )


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock, *, scale: float
) -> tuple[Tensor, Tensor]:
    """FlashAttention's `backends.attend_block`; not differentiable."""
    output, lse = varlen_attn(
        q,
        k,
        v,
        block.borders_q,
        block.borders_k,
        max(block.query_lens),
        max(block.key_lens),
        return_aux=AuxRequest(lse=True),
        scale=scale,
        window_size=block.window,
        **_shared_heads(q, k),
    )
    return output, lse


def block_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: AttentionBlock,
    *,
    output: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention's `backends.block_gradients`.

    The kernel recomputes probabilities from the scores and the given log-sum-exp. With the one over
    all keys they are the block's share of the whole softmax. The operator is called directly
    because autograd would pass the block's own log-sum-exp.
    """
    # A generator's state, not read.
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        grad,
        q,
        k,
        v,
        output,
        lse.contiguous(),
        block.borders_q,
        block.borders_k,
        max(block.query_lens),
        max(block.key_lens),
        0.0,
        block.window == (-1, 0),
        no_dropout,
        no_dropout,
        scale=scale,
        window_size_left=block.window[0],
        window_size_right=block.window[1],
    )


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    borders_q: Tensor,
    borders_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    window: int | None,
    is_causal: bool = True,
) -> Tensor:
    left = -1 if window is None or window >= max_k else window - 1  # without the token itself
    output = varlen_attn(
        q,
        k,
        v,
        borders_q,
        borders_k,
        max_q,
        max_k,
        scale=scale,
        window_size=(left, 0 if is_causal else -1),
        **_shared_heads(q, k),
    )
    assert isinstance(output, Tensor)  # a pair only if the log-sum-exp is requested
    return output


def _shared_heads(q: Tensor, k: Tensor) -> dict[str, Any]:
    """Arguments with which several query heads share a key head."""
    return {"enable_gqa": True} if q.shape[1] > k.shape[1] and _ASKS_FOR_SHARED_HEADS else {}


def _stored_keys(context: PagedContext, *, block_size: int) -> tuple[Tensor, Tensor]:
    """Borders and slots of every key of every sequence, in order (`PagedContext.stored_keys`)."""
    device, total = context.context_lens.device, sum(context.key_lens)
    borders = borders_of(context.key_lens, device)
    lengths = context.context_lens.long()
    sequence = torch.arange(len(context.key_lens), device=device).repeat_interleave(
        lengths, output_size=total
    )
    position = torch.arange(total, device=device) - borders.long()[sequence]
    block = context.block_tables[sequence, position // block_size].long()
    return borders, block * block_size + position % block_size
