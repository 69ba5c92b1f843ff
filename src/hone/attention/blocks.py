"""Attention to a part of the keys, in plain torch.

It also returns the log-sum-exp of the scores, so that outputs over different keys can be merged,
and so that each part's gradient follows from the merged log-sum-exp alone (Dao et al. 2022,
arXiv:2205.14135, section 3.1 and appendix B).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from hone.attention.context import borders_of

__all__ = ["AttentionBlock", "attend", "gradients", "merge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlock:
    """A block of attention: rows of queries, rows of keys, both packed sequences, and the mask
    between them.

    Sequence i of the queries sees keys of sequence i only. With Lq and Lk tokens of each, query p
    is aligned with key `P = p + Lk - Lq` and sees the keys `P - left .. P + right` where `window =
    (left, right)`; -1 is no bound. Every query sees a key.
    """

    queries: slice
    keys: slice
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    window: tuple[int, int]
    borders_q: Tensor  # [S + 1] int32
    borders_k: Tensor  # [S + 1] int32

    @classmethod
    def of(
        cls,
        queries: range,
        keys: range,
        *,
        window: tuple[int, int],
        device: torch.device,
        lengths: Sequence[int] | None = None,
    ) -> AttentionBlock:
        """A block of one sequence, or with `lengths` of several, which have as many keys as
        queries."""
        query_lens = tuple(lengths or (len(queries),))
        key_lens = tuple(lengths or (len(keys),))
        return cls(
            queries=slice(queries.start, queries.stop),
            keys=slice(keys.start, keys.stop),
            query_lens=query_lens,
            key_lens=key_lens,
            window=window,
            borders_q=borders_of(query_lens, device),
            borders_k=borders_of(key_lens, device),
        )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: AttentionBlock,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Reference of `backends.attend_block`; the output has the dtype of the log-sum-exp."""
    parts: list[tuple[Tensor, Tensor]] = []
    for rows_q, rows_k in _sequences(block):
        scores, _ = _scores(q[rows_q], k[rows_k], block.window, scale=scale, softcap=softcap)
        lse = scores.logsumexp(-1)  # [Hkv, G, Lq]
        weights = (scores - lse.unsqueeze(-1)).exp()
        output = torch.einsum("hgqk,khd->qhgd", weights, v[rows_k].to(lse.dtype))
        parts.append((output.flatten(1, 2), lse.flatten(0, 1)))
    outputs, lses = zip(*parts, strict=True)
    return torch.cat(outputs), torch.cat(lses, dim=1)


def gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: AttentionBlock,
    *,
    output: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of `backends.block_gradients`; the gradients have the dtype of the log-sum-exp."""
    wide, groups = lse.dtype, (k.shape[1], -1)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for rows_q, rows_k in _sequences(block):
        query, grad_out, out = (x[rows_q].to(wide).unflatten(1, groups) for x in (q, grad, output))
        key, value = k[rows_k].to(wide), v[rows_k].to(wide)
        scores, slope = _scores(q[rows_q], key, block.window, scale=scale, softcap=softcap)
        weights = (scores - lse[:, rows_q].unflatten(0, groups).unsqueeze(-1)).exp()
        grad_weights = torch.einsum("qhgd,khd->hgqk", grad_out, value)
        mean = (grad_out * out).sum(-1).permute(1, 2, 0).unsqueeze(-1)  # [Hkv, G, Lq, 1]
        grad_scores = weights * (grad_weights - mean) * slope
        parts.append(
            (
                torch.einsum("hgqk,khd->qhgd", grad_scores, key).flatten(1, 2),
                torch.einsum("hgqk,qhgd->khd", grad_scores, query),
                torch.einsum("hgqk,qhgd->khd", weights, grad_out),
            )
        )
    grad_q, grad_k, grad_v = map(torch.cat, zip(*parts, strict=True))
    return grad_q, grad_k, grad_v


def merge(output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge the attention to two sets of keys; output [T, H, D], lse [H, T], in place."""
    share_of_other = torch.sigmoid(other_lse - lse).T.unsqueeze(-1)
    output.lerp_(other.to(output.dtype), share_of_other)
    torch.logaddexp(lse, other_lse, out=lse)


def _sequences(block: AttentionBlock) -> Iterator[tuple[slice, slice]]:
    """Rows of the block's queries and keys that belong to each sequence."""
    spans = (pairwise(accumulate(x, initial=0)) for x in (block.query_lens, block.key_lens))
    for rows_q, rows_k in zip(*spans, strict=True):
        yield slice(*rows_q), slice(*rows_k)


def _scores(
    q: Tensor, k: Tensor, window: tuple[int, int], *, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | float]:
    """Scores of q [Lq, Hq, D] and k [Lk, Hkv, D], and their slope with respect to the scalar
    product: [Hkv, G, Lq, Lk] float32 or wider, -inf where a query does not see a key."""
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(wide).unflatten(1, (k.shape[1], -1))
    scores, slope = torch.einsum("qhgd,khd->hgqk", grouped, k.to(wide)) * scale, scale
    if softcap is not None:
        bounded = torch.tanh(scores / softcap)
        scores, slope = bounded * softcap, (1 - bounded * bounded) * scale
    num_queries, num_keys = scores.shape[-2:]
    aligned = torch.arange(num_queries, device=q.device).unsqueeze(1) + num_keys - num_queries
    ahead = torch.arange(num_keys, device=q.device) - aligned
    left, right = window
    if left >= 0:
        scores = scores.masked_fill(ahead < -left, float("-inf"))
    if right >= 0:
        scores = scores.masked_fill(ahead > right, float("-inf"))
    return scores, slope
