"""Context parallelism of a micro-batch: its tokens are split, and the logprobs of all ranks
gathered.

    share = split(batch, mesh)
    hidden = hidden_states(model, share.input_ids, share.position_ids, share.context)
    logprobs, entropy = token_logprobs(model, hidden[share.predict_index], share.labels)
    logprobs = gather(logprobs, share)           # [N] in packing order, equal on all context ranks

Letters: T tokens and N trained tokens of the micro-batch, t and n of them on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hone.attention import ContextParallel, PackedContext
from hone.attention.token_shares import padded_tokens, token_ranges
from hone.distributed.mesh import Axis, Mesh
from hone.models.routes import unrecorded
from hone.segments import Segment, plan_segments
from hone.trainer.collating import to_device
from hone.trainer.shard import MicroBatchShard, whole_shard
from hone.types import MicroBatch

__all__ = ["ContextShard", "gather", "own_part", "share_of_layers", "split"]


@dataclass(frozen=True, slots=True)
class _Others:
    """Places of the trained tokens of all ranks of the context axis, for `gather`."""

    axis: Axis
    own: Tensor  # [n] int64 into [N]: this rank's
    longest: int  # largest n of a rank
    places: Tensor  # [N] int64 into [size * longest]: each token among those of all ranks


@dataclass(frozen=True, slots=True)
class ContextShard(MicroBatchShard):
    """The share of one rank among several of the context axis."""

    others: _Others


def share_of_layers(batch: MicroBatch, mesh: Mesh) -> int:
    """Number of tokens of `batch` that this rank has between layers: its share along the context
    axis, divided again along the tensor axis."""
    ring, ulysses = mesh.ring.size, mesh.ulysses.size
    num_tokens = padded_tokens(batch.num_tokens, ring=ring, ulysses=ulysses)
    return -(-num_tokens // (ring * ulysses * mesh.tensor.size))


def split(batch: MicroBatch, mesh: Mesh, *, replays_routes: bool = False) -> MicroBatchShard:
    """This rank's share of `batch`, which must be the same on every rank of `mesh.context`.

    The row is padded at its end by a sequence that trains nothing, so that all shares are equal.
    With one rank along context the share is the batch. `batch` lies in host memory (`collate(...,
    "cpu")`), so that nothing here waits for a device; its tensors are copied to `mesh.device`
    without waiting either. With `replays_routes` tokens pass the experts of the column `routes`,
    except in batches without rows. Raises ValueError where the batch lies on a device and would
    have to be read.
    """
    if mesh.context.size == 1:
        return whole_shard(batch, mesh.device, replays_routes=replays_routes)
    if batch.input_ids.device.type != "cpu":
        raise ValueError(
            f"a micro-batch on {batch.input_ids.device} cannot be split without waiting for the "
            'device; collate it on "cpu", split moves it'
        )
    if batch.spans is not None:
        raise ValueError(
            f"rows {', '.join(batch.ids)} have images whose tokens see each other in both "
            "directions, which cannot be split over the context axis; set "
            "parallel.ring_size and parallel.ulysses_size to 1"
        )
    move = partial(to_device, device=mesh.device)
    routes = batch.column("routes") if replays_routes and batch.ids else None
    ring, ulysses, rank = mesh.ring, mesh.ulysses, mesh.context.rank
    num_tokens = padded_tokens(batch.num_tokens, ring=ring.size, ulysses=ulysses.size)
    padding = num_tokens - batch.num_tokens
    lengths = (*batch.lengths, padding) if padding else batch.lengths
    context = PackedContext.from_lengths(lengths, device=mesh.device)
    segments = None
    if batch.segments is not None:
        starts = accumulate(lengths, initial=0)
        rows = [Segment(*x) for x in zip(starts, lengths, strict=False)]
        segments = plan_segments(rows, lambda array: move(torch.as_tensor(array)))
    owner, local = _places(num_tokens, mesh)
    own_tokens = (owner == rank).nonzero().squeeze(1)
    own_routes = None
    if routes is not None:
        none = unrecorded(routes.dtype)
        own_routes = move(F.pad(routes, (0, 0, 0, 0, 0, padding), value=none)[own_tokens])
    owner_N = owner[batch.predict_index]
    trained = [(owner_N == other).nonzero().squeeze(1) for other in range(mesh.context.size)]
    own, longest = trained[rank], max(1, *map(len, trained))
    places = torch.empty_like(owner_N)
    for other, tokens in enumerate(trained):
        places[tokens] = other * longest + torch.arange(len(tokens))
    return ContextShard(
        input_ids=move(F.pad(batch.input_ids, (0, padding))[own_tokens]),
        position_ids=move(_padded(batch.position_ids, padding)[..., own_tokens]),
        context=replace(
            context,
            parallel=ContextParallel(ring=ring, ulysses=ulysses),
            routes=own_routes,
            segments=segments,
        ),
        predict_index=move(local[batch.predict_index[own]]),
        labels=move(batch.labels[own]),
        others=_Others(
            axis=mesh.context,
            own=move(own),
            longest=longest,
            places=move(places),
        ),
    )


def _padded(positions: Tensor, padding: int) -> Tensor:
    """Positions [T] or [A, T], extended by those of a text sequence of `padding` tokens."""
    added = torch.arange(padding).expand(*positions.shape[:-1], padding)
    return torch.cat([positions, added], dim=-1)


def gather(values_n: Tensor, share: MicroBatchShard) -> Tensor:
    """One value for each trained token of the micro-batch, from those of this rank's tokens.

    `values_n` is [n] or [n, ...] in the order of `share.predict_index`; the result is [N] or
    [N, ...] in packing order, equal on all ranks along context. Collective along context, also for
    a rank with n = 0. Differentiable: the gradient is this rank's part of the gradient of the
    result, not a sum over ranks, since every rank computes the same objective from the result.
    Backward must run on every rank, as the layers' own collectives do.
    """
    return _Gather.apply(values_n, share.others) if isinstance(share, ContextShard) else values_n


def own_part(values_N: Tensor, share: MicroBatchShard) -> Tensor:
    """This rank's entries of `values_N` (one value for each trained token of the micro-batch), on
    the device of its tokens."""
    values_N = to_device(values_N, share.labels.device)
    return values_N[share.others.own] if isinstance(share, ContextShard) else values_N


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_n: Tensor, others: _Others) -> Tensor:
        ctx.own = others.own
        rest = values_n.shape[1:]
        sent = values_n.new_zeros(others.longest, *rest)
        sent[: len(values_n)] = values_n
        received = values_n.new_empty(others.axis.size, others.longest, *rest)
        dist.all_gather(list(received.unbind(0)), sent, group=others.axis.group)
        return received.flatten(0, 1).index_select(0, others.places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.own), None


def _places(num_tokens: int, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """For each token of the padded row, two tensors [T] int64: its rank along the context axis, and
    its index on that rank."""
    owner, local = torch.empty(2, num_tokens, dtype=torch.int64).unbind(0)
    sizes = {"ring": mesh.ring.size, "ulysses": mesh.ulysses.size}
    for rank in range(mesh.context.size):
        ring_rank, ulysses_rank = divmod(rank, mesh.ulysses.size)
        start = 0
        for tokens in token_ranges(
            num_tokens, **sizes, ring_rank=ring_rank, ulysses_rank=ulysses_rank
        ):
            row = slice(tokens.start, tokens.stop)
            owner[row] = rank
            local[row] = torch.arange(start, start + len(tokens))
            start += len(tokens)
    return owner, local
