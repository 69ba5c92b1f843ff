"""Attention of packed rows whose tokens are split over processes.

*Ulysses* (Jacobs et al. 2023, arXiv:2309.14509): every rank has a contiguous part of the row. One
all-to-all turns all heads of a part of the tokens into a part of the heads of all tokens, attention
is that of one process, and a second all-to-all turns its output back. Gated linear attention does
the same (`hone.attention.recurrent.mixing`).

*Ring* (Liu et al. 2023, arXiv:2310.01889): keys and values travel from rank to rank while each
computes with those it has, and the partial outputs are merged by their log-sum-exps. The row is cut
into 2 x ring chunks of which rank i has i and 2 ring - 1 - i, so that causal work is equal.

Both: the ring cuts the row, and the ranks of a Ulysses group share the tokens of one ring rank.

Sequences are contiguous, so at most one reaches from one chunk into another. Hence no mask is
needed between queries of chunk a and keys of chunk b: b < a is a full rectangle of that sequence's
tokens, b = a causal attention of packed sequences, b > a nothing. A sliding window cuts a corner
off the rectangle.

Letters: T tokens of the row, t of a rank, C of a chunk, H heads, D head size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hone.attention import backends
from hone.attention.blocks import AttentionBlock, merge
from hone.attention.context import PackedContext
from hone.attention.token_shares import chunk_numbers
from hone.distributed.mesh import Axis

__all__ = ["heads_to_tokens", "packed_attention", "tokens_to_heads"]


# ---------------------------------------------------------------- who has which tokens


# ---------------------------------------------------------------- attention


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: PackedContext,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of this rank's tokens within their packed sequences, differentiable.

    q is [t, Hq, D], k and v [t, Hkv, D], of the tokens that `token_ranges` gives. Returns [t, Hq,
    D]. Collective over the ranks of `context.parallel`, also in backward; neither waits for the
    device. Memory is that of t tokens.
    """
    parallel = context.parallel
    assert parallel is not None
    ulysses, ring = parallel.ulysses, parallel.ring
    if ulysses.size > 1:
        # Fewer key heads than ranks are on several of them, and their gradients are summed.
        copies = max(1, ulysses.size // k.shape[1])
        if copies > 1:
            k, v = (x.unsqueeze(2).expand(-1, -1, copies, -1).flatten(1, 2) for x in (k, v))
        q, k, v = tokens_to_heads((q, k, v), ulysses)
    if ring.size > 1:
        plan = _ring_plan(context.lengths, ring.size, ring.rank, window, q.device)
        output = _RingAttention.apply(q, k, v, _Ring(ring, plan, scale, softcap))
    else:
        output = backends.packed_attention(
            q, k, v, context, scale=scale, window=window, softcap=softcap
        )
    return heads_to_tokens(output, ulysses) if ulysses.size > 1 else output


# ---------------------------------------------------------------- Ulysses


def tokens_to_heads(values: Sequence[Tensor], axis: Axis) -> list[Tensor]:
    """From all heads of a part of the tokens to a part of the heads of all tokens, for several
    kinds of values [t, H, D] of one dtype, whose numbers of heads U divides: [U t, H / U, D] each.
    Differentiable."""
    return list(_TokensToHeads.apply(axis, *values))


class _TokensToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        ctx.shapes = [(x.shape[1] // axis.size, x.shape[2]) for x in values]
        ctx.sizes = [heads * size for heads, size in ctx.shapes]
        parts = [x.unflatten(1, (axis.size, -1)).flatten(2).transpose(0, 1) for x in values]
        received = _all_to_all(torch.cat(parts, dim=2), axis).flatten(0, 1)
        pieces = received.split(ctx.sizes, dim=1)
        return tuple(x.unflatten(1, own) for x, own in zip(pieces, ctx.shapes, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        axis: Axis = ctx.axis
        sent = torch.cat([grad.flatten(1) for grad in grads], dim=1).unflatten(0, (axis.size, -1))
        received = _all_to_all(sent, axis).transpose(0, 1)  # [t, U, h D]
        pieces = received.split(ctx.sizes, dim=2)
        found = (x.unflatten(2, own) for x, own in zip(pieces, ctx.shapes, strict=True))
        return (None, *(x.flatten(1, 2) for x in found))


def heads_to_tokens(output: Tensor, axis: Axis) -> Tensor:
    """From a part of the heads of all tokens [U t, H / U, D] to all heads of a part of the tokens
    [t, H, D]. Differentiable."""
    return _HeadsToTokens.apply(output, axis)


class _HeadsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        received = _all_to_all(output.unflatten(0, (axis.size, -1)), axis)
        return received.transpose(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        axis: Axis = ctx.axis
        parts = grads[0].unflatten(1, (axis.size, -1)).transpose(0, 1)
        return _all_to_all(parts, axis).flatten(0, 1), None


def _all_to_all(parts: Tensor, axis: Axis) -> Tensor:
    """Send part i of `parts` [U, ...] to rank i. Returns the parts received from all ranks, [U,
    ...]."""
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=axis.group)
    return received


# ---------------------------------------------------------------- ring


Plan = tuple[tuple[AttentionBlock, ...], ...]
"""Blocks of each ring step. At step s a rank has the keys of the rank s positions before it."""


@dataclass(frozen=True, slots=True)
class _Ring:
    axis: Axis
    plan: Plan
    scale: float
    softcap: float | None


class _RingAttention(torch.autograd.Function):
    """Attention of q [t, Hq, D] to the keys and values of all ranks, [t, Hkv, D] each: [t, Hq, D].

    The partial outputs are merged in float32 at least. In backward the probabilities of each block
    follow from the merged log-sum-exp. The gradients of keys and values follow them around the
    ring, adding each rank's share, until they are back at their own rank.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: _Ring) -> Tensor:
        own_kv = kv = torch.stack((k, v))
        merged: tuple[Tensor, Tensor] | None = None
        for step, blocks in enumerate(ring.plan):
            arriving = _Rotation(kv, ring.axis) if step + 1 < len(ring.plan) else None
            k, v = kv.unbind(0)
            for block in blocks:
                rows, keys = block.queries, block.keys
                output, lse = backends.attend_block(
                    q[rows], k[keys], v[keys], block, scale=ring.scale, softcap=ring.softcap
                )
                if merged is None:  # The first block has all queries.
                    # Copies: a recompute policy may keep what the kernel returned.
                    merged = output.to(lse.dtype, copy=True), lse.clone()
                else:
                    merge(merged[0][rows], merged[1][:, rows], output, lse)
            if arriving is not None:
                kv = arriving.wait()
        assert merged is not None
        output, lse = merged[0].to(q.dtype), merged[1]
        ctx.ring = ring
        ctx.save_for_backward(q, own_kv, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        ring: _Ring = ctx.ring
        q, kv, output, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_q = torch.zeros_like(q, dtype=lse.dtype)
        returning: _Rotation | None = None
        for step, blocks in enumerate(ring.plan):
            arriving = _Rotation(kv, ring.axis) if step + 1 < len(ring.plan) else None
            k, v = kv.unbind(0)
            shares: list[tuple[slice, Tensor, Tensor]] = []
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
                    scale=ring.scale,
                    softcap=ring.softcap,
                )
                grad_q[rows] += share_q
                shares.append((keys, share_k, share_v))
            # The gradients of the ranks before were in transit while this rank computed its own.
            if returning is None:
                grad_kv = torch.zeros_like(kv, dtype=lse.dtype)
            else:
                grad_kv = returning.wait()
            for keys, share_k, share_v in shares:
                grad_kv[0, keys] += share_k
                grad_kv[1, keys] += share_v
            returning = _Rotation(grad_kv, ring.axis)
            if arriving is not None:
                kv = arriving.wait()
        assert returning is not None
        grad_k, grad_v = returning.wait().to(q.dtype).unbind(0)
        return grad_q.to(q.dtype), grad_k, grad_v, None


class _Rotation:
    """A transfer in both directions: a tensor to the next rank, and the previous rank's tensor to
    this one."""

    def __init__(self, sent: Tensor, axis: Axis) -> None:
        self._sent = sent  # kept alive until it is sent
        self._received = torch.empty_like(sent)
        following, preceding = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
        ends = (
            dist.P2POp(dist.isend, sent, group=axis.group, group_peer=following),
            dist.P2POp(dist.irecv, self._received, group=axis.group, group_peer=preceding),
        )
        self._works = dist.batch_isend_irecv(list(ends))

    def wait(self) -> Tensor:
        """The received tensor. On CUDA the stream waits, not the host."""
        for work in self._works:
            work.wait()
        return self._received


# The plan is the same for all layers, in forward and in backward, hence the cache.
@lru_cache(maxsize=16)
def _ring_plan(
    lengths: tuple[int, ...], size: int, rank: int, window: int | None, device: torch.device
) -> Plan:
    """Blocks that rank `rank` computes at each step, for packed sequences of the given lengths."""
    borders = list(accumulate(lengths, initial=0))
    chunk = borders[-1] // (2 * size)
    own = chunk_numbers(size, rank)
    steps: list[list[AttentionBlock]] = [[_own_block(borders, chunk, own, window, device)]]
    steps += [[] for _ in range(size - 1)]
    for step, blocks in enumerate(steps):
        visiting = chunk_numbers(size, (rank - step) % size)
        for (q_slot, a), (k_slot, b) in product(enumerate(own), enumerate(visiting)):
            for queries, keys, visible in _rectangles(borders, chunk, a, b, window):
                blocks.append(
                    AttentionBlock.of(
                        _shift(queries, (q_slot - a) * chunk),
                        _shift(keys, (k_slot - b) * chunk),
                        window=visible,
                        device=device,
                    )
                )
    return tuple(map(tuple, steps))


def _own_block(
    borders: list[int],
    chunk: int,
    own: tuple[int, ...],
    window: int | None,
    device: torch.device,
) -> AttentionBlock:
    """Block of a rank's chunks with themselves: the parts of sequences in each, causal."""
    lengths: list[int] = []
    for c in own:
        first, last = c * chunk, (c + 1) * chunk
        ends = [first, *(border for border in borders if first < border < last), last]
        lengths += [end - start for start, end in pairwise(ends)]
    tokens = range(len(own) * chunk)
    left = -1 if window is None or window >= max(lengths) else window - 1
    return AttentionBlock.of(tokens, tokens, lengths=lengths, window=(left, 0), device=device)


def _rectangles(
    borders: list[int], chunk: int, a: int, b: int, window: int | None
) -> Iterator[tuple[range, range, tuple[int, int]]]:
    """Queries of chunk a, the keys of chunk b that they see, and a window; at most two such
    rectangles.

    All are in the one sequence that reaches from b into a. With a sliding window the first queries
    may see all of these keys, the next ones all but a corner, and the last ones none.
    """
    if b >= a:
        return
    sequence = bisect_right(borders, a * chunk)
    queries = range(a * chunk, min(borders[sequence], (a + 1) * chunk))
    keys = range(max(borders[sequence - 1], b * chunk), (b + 1) * chunk)
    if not keys:
        return
    if window is None:
        yield queries, keys, (-1, -1)
        return
    # Query p sees the keys from p - window + 1 on.
    num_full = min(max(keys.start + window - queries.start, 0), len(queries))
    if num_full:
        yield queries[:num_full], keys, (-1, -1)
    queries = range(queries.start + num_full, min(queries.stop, keys.stop + window - 1))
    keys = range(queries.start - window + 1, keys.stop)
    if queries:
        yield queries, keys, (len(keys) - len(queries), len(queries) - 1)


def _shift(tokens: range, by: int) -> range:
    return range(tokens.start + by, tokens.stop + by)
