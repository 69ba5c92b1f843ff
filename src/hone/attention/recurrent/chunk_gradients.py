"""Gradients inside of the chunks of the gated delta rule, in plain torch.

One kernel of `fla-core` is wrong where Triton from 3.4 to before 3.7.1 compiles it for Hopper GPUs,
and the package refuses to run it there (its issue 640); torch 2.11 brings Triton 3.6. This is what
that kernel computes, as batched matrix products. With a newer Triton the package's own backward is
used. How long this takes has not been measured.

Of a chunk with decays G (cumulated, in log), first state h and new values v, outputs and last state
are, with s = 1 / sqrt(K):

    o_i = s q_i (exp(G_i) h + sum_{j <= i} exp(G_i - G_j) k_j v_j^T)
    h'  = exp(G_L) h + sum_j exp(G_L - G_j) k_j v_j^T

and new values are v = u - w h. Letters: C chunks, L tokens of a chunk, H heads, K and V sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "ChunkGradients",
    "ChunkInputs",
    "chunk_gradients",
    "chunk_places",
    "into_chunks",
    "out_of_chunks",
]


class ChunkInputs(NamedTuple):
    """Tokens in chunks, [C, H, L, ...], with zeros behind a segment's end."""

    q: Tensor  # [C, H, L, K]
    k: Tensor  # [C, H, L, K]
    v: Tensor  # [C, H, L, V], new values
    do: Tensor  # [C, H, L, V], gradient of the output
    dv: Tensor  # [C, H, L, V], gradient of the new values, from outputs and later states
    log_decays: Tensor  # [C, H, L], cumulated


class ChunkGradients(NamedTuple):
    """Gradients of the same tokens."""

    dq: Tensor  # [C, H, L, K]
    dk: Tensor  # [C, H, L, K]
    dw: Tensor  # [C, H, L, K]
    dg: Tensor  # [C, H, L] float32, of the cumulated decays


def chunk_places(cu_seqlens: Tensor, chunks: Tensor, size: int) -> Tensor:
    """Numbers of the tokens of each chunk, [C, L] int64; -1 behind a segment's end. `cu_seqlens`
    and `chunks` are those of a `SegmentLevel`."""
    segments, which = chunks.unbind(1)
    places = (cu_seqlens[segments] + size * which)[:, None] + torch.arange(
        size, device=chunks.device
    )
    return places.where(places < cu_seqlens[segments + 1][:, None], -1)


def into_chunks(x: Tensor, places: Tensor, num_heads: int) -> Tensor:
    """Values [T, h, ...] of tokens in chunks [C, H, L, ...], with zeros behind a segment's end and
    each head as often as `num_heads` H needs it."""
    is_token = places >= 0
    parts = x[places.clamp(min=0)] * is_token.view(*places.shape, *[1] * (x.ndim - 1))
    return parts.transpose(1, 2).repeat_interleave(num_heads // x.shape[1], 1)


def out_of_chunks(x: Tensor, places: Tensor, num_tokens: int) -> Tensor:
    """Values [T, H, ...] of tokens, from chunks [C, H, L, ...]. The host waits for nothing."""
    rows = x.transpose(1, 2).flatten(0, 1)
    own = rows.new_empty(num_tokens + 1, *rows.shape[1:])  # the last row takes what is no token
    own[places.where(places >= 0, num_tokens).flatten()] = rows
    return own[:num_tokens]


def chunk_gradients(
    inputs: ChunkInputs, lasts: Tensor, h: Tensor, dh: Tensor, scale: float
) -> ChunkGradients:
    """Gradients from `h` and `dh` [C, H, K, V], a chunk's first state and the gradient of its last
    one. `lasts` [C] has the number of a chunk's last token."""
    q, k, v, do, dv, log_decays = inputs
    number = torch.arange(q.shape[2], device=q.device)
    total = log_decays.float()
    end = total.gather(2, lasts[:, None, None].expand(-1, total.shape[1], 1))
    is_token = number <= lasts[:, None]  # [C, L]
    to_end = torch.where(is_token[:, None], (end - total).exp(), 0.0)
    pairs = total[..., :, None] - total[..., None, :]
    seen = (number[:, None] >= number) & is_token[:, None, :] & is_token[:, :, None]
    scores = torch.where(seen[:, None], (do @ v.mT) * pairs.exp() * scale, 0.0).to(q.dtype)
    h, dh_ = h.to(q.dtype), dh.to(q.dtype)
    dq = (do @ h.mT).float() * (total.exp() * scale)[..., None] + scores @ k
    to_state = (v @ dh_.mT).float() * to_end[..., None]
    dk = to_state + scores.mT @ q
    dw = -(dv @ h.mT)
    dg = (dq * q).sum(-1) - (dk * k).sum(-1)
    whole = end.squeeze(2).exp() * (h.float() * dh.float()).sum((2, 3)) + (to_state * k).sum((2, 3))
    at_end = number == lasts[:, None]  # [C, L]
    dg = dg + torch.where(at_end[:, None], whole[..., None], 0.0)
    return ChunkGradients(dq.to(q.dtype), dk.to(q.dtype), dw.to(q.dtype), dg)
