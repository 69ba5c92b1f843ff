"""Attention that is computed in blocks of queries and keys: outputs merged, gradients added up.

Two outputs of the same queries over different keys are merged by their log-sum-exps. In backward
the probabilities of each block follow from the merged log-sum-exp, so that blocks are independent
(Dao et al. 2022, arXiv:2205.14135, section 3.1 and appendix B).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hone.attention import backends
from hone.attention.blocks import AttentionBlock

__all__ = ["KeyGradients", "add_key_gradients", "attend_blocks", "block_gradients", "merge"]

KeyGradients = tuple[slice, Tensor, Tensor]
"""Rows of keys and the gradients of their keys and values, [Tk, Hkv, D] each."""


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Iterable[AttentionBlock],
    *,
    scale: float,
    softcap: float | None = None,
    merged: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Output [Tq, Hq, D] and log-sum-exp [Hq, Tq] over the keys of all blocks, float32 or wider.

    q is [Tq, Hq, D], k and v [Tk, Hkv, D], of which each block names its rows. `merged` are results
    over other keys, which are changed in place; without it the first block has all queries. None
    where there is neither. Not differentiable, see `block_gradients`.
    """
    for block in blocks:
        rows, keys = block.queries, block.keys
        output, lse = backends.attend_block(
            q[rows], k[keys], v[keys], block, scale=scale, softcap=softcap
        )
        if merged is None:
            # Copies: a recompute policy may hold on to what the kernel returned.
            merged = output.to(lse.dtype, copy=True), lse.clone()
        else:
            merge(merged[0][rows], merged[1][:, rows], output, lse)
    return merged


def block_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Iterable[AttentionBlock],
    *,
    output: Tensor,
    lse: Tensor,
    grad_q: Tensor,
    scale: float,
    softcap: float | None = None,
) -> list[KeyGradients]:
    """Gradients of the keys and values of each block, given that of the output, [Tq, Hq, D].

    Output and log-sum-exp are the merged ones over *all* keys. Those of queries are added to
    `grad_q` [Tq, Hq, D], of the dtype of the log-sum-exp.
    """
    shares: list[KeyGradients] = []
    for block in blocks:
        rows, keys = block.queries, block.keys
        share_q, share_k, share_v = backends.block_gradients(
            grad[rows],
            q[rows],
            k[keys],
            v[keys],
            block,
            output=output[rows],
            lse=lse[:, rows],
            scale=scale,
            softcap=softcap,
        )
        grad_q[rows] += share_q
        shares.append((keys, share_k, share_v))
    return shares


def add_key_gradients(grad_kv: Tensor, shares: Iterable[KeyGradients]) -> None:
    """Add what blocks found to the gradients of keys and values, [2, Tk, Hkv, D]."""
    for keys, share_k, share_v in shares:
        grad_kv[0, keys] += share_k
        grad_kv[1, keys] += share_v


def merge(output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Attention to two sets of keys from that to each; output [T, H, D], lse [H, T], in place."""
    share_of_other = torch.sigmoid(other_lse - lse).T.unsqueeze(-1)
    output.lerp_(other.to(output.dtype), share_of_other)
    torch.logaddexp(lse, other_lse, out=lse)
