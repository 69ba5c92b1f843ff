"""Rows to micro-batches: which sequences share a forward pass where, and the tensors of that pass.

    for indices in plan(rows, num_ranks=4, max_tokens=16384)[rank]:
        batch = collate([rows[i] for i in indices], [weights[i] for i in indices], device)

A pass never holds more than `max_tokens` tokens. Within that cap passes are balanced by estimated
FLOPs, since attention makes one long sequence more expensive than many short ones of as many tokens
in all.

The plan is a pure function of the rows, so every rank that holds all rows computes all of
it and needs no message; `digest` is what ranks compare before they rely on that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hone.types import MicroBatch, Trajectory

__all__ = [
    "AttentionCost",
    "Plan",
    "check_rows",
    "collate",
    "digest",
    "empty_batch",
    "on_device",
    "plan",
    "to_device",
]

Cost = Callable[[int], float]
"""Relative time of a forward pass over one sequence of so many tokens; must not decrease."""

Plan = list[list[list[int]]]
"""Row indices of each pass of each rank; all ranks have the same number of passes."""


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """FLOPs of a sequence's forward pass: linear in its tokens, plus causal attention."""

    per_token: float
    per_token_squared: float

    @classmethod
    def of(cls, *, num_parameters: int, num_layers: int, attention_width: int) -> AttentionCost:
        """`attention_width` is query heads times head size. Scores and values cost
        `4 * width * n^2 / 2` FLOPs a layer, matrices 2 FLOPs a parameter and token."""
        return cls(2.0 * num_parameters, 2.0 * num_layers * attention_width)

    def __call__(self, num_tokens: int) -> float:
        return self.per_token * num_tokens + self.per_token_squared * num_tokens**2


def plan(
    rows: Sequence[Trajectory],
    *,
    max_tokens: int,
    num_ranks: int = 1,
    micro_batch_size: int | None = None,
    cost: Cost | None = None,
    balance: bool = True,
) -> Plan:
    """Cut rows into passes, equally many for each of `num_ranks`; deterministic.

    With `micro_batch_size` a pass takes at most that many rows, whatever their length; otherwise
    at most `max_tokens` tokens. As few passes as the cap allows are balanced by `cost` (default:
    tokens), the most expensive rows first, each into the cheapest pass where it fits. Ranks wait
    for each other in every pass, so those that run at the same time are of like cost; the sums over
    a rank's passes are balanced after that. Passes without rows come last.

    Without `balance` each rank gets neighbouring rows, equally many, and only its own passes are
    balanced.

    Raises ValueError for a row longer than `max_tokens`.
    """
    lengths = [row.num_tokens for row in rows]
    if micro_batch_size is not None:
        sizes, capacity = [1] * len(rows), micro_batch_size
    else:
        sizes, capacity = lengths, max_tokens
        for row, length in zip(rows, lengths, strict=True):
            if length > max_tokens:
                raise ValueError(
                    f"sequence {row.id!r} has {length} tokens, more than the budget of "
                    f"{max_tokens} for one pass; raise trainer.max_tokens_per_microbatch (or "
                    "max_tokens_per_forward), or shorten prompts or completions"
                )
    cost = cost or float
    costs = [cost(n) for n in lengths]
    shares = [range(len(rows))] if balance else _neighbours(len(rows), num_ranks)
    sharers = num_ranks // len(shares)

    def rounds(num_bins: int) -> int:
        return ceil(num_bins / sharers)

    num_passes = max(rounds(_fewest_bins([sizes[i] for i in s], capacity)) for s in shares)
    while True:
        placed = [_place(s, sizes, costs, capacity, num_passes * sharers) for s in shares]
        needed = max(rounds(len(bins)) for bins in placed)
        if needed == num_passes:
            return [passes for bins in placed for passes in _assign_to_ranks(bins, costs, sharers)]
        num_passes = needed


def digest(rows: Sequence[Trajectory], passes: Plan) -> str:
    """A few characters that differ where rows or plans do: by ids, lengths and order."""
    content = ([(row.id, row.num_tokens) for row in rows], passes)
    return hashlib.blake2b(repr(content).encode(), digest_size=8).hexdigest()


def _neighbours(num_rows: int, num_ranks: int) -> list[range]:
    borders = [num_rows * rank // num_ranks for rank in range(num_ranks + 1)]
    return [range(*ends) for ends in pairwise(borders)]


def _fewest_bins(sizes: Sequence[int], capacity: int) -> int:
    """A lower bound: of rows above `capacity / (k + 1)` a bin holds at most k."""
    large = (sum(size * (k + 1) > capacity for size in sizes) for k in range(1, 9))
    return max(ceil(sum(sizes) / capacity), *(ceil(n / k) for k, n in enumerate(large, start=1)))


def _place(
    rows: Sequence[int],
    sizes: Sequence[int],
    costs: Sequence[float],
    capacity: int,
    num_bins: int,
) -> list[list[int]]:
    """Longest-processing-time placement into `num_bins` bins, or more where a row fits in none."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = np.full(num_bins + len(rows), capacity)
    load = np.zeros(num_bins + len(rows))
    for row in sorted(rows, key=lambda i: (-costs[i], i)):
        loads = np.where(room[: len(bins)] >= sizes[row], load[: len(bins)], np.inf)
        best = int(loads.argmin()) if bins else 0
        if not bins or loads[best] == np.inf:
            best = len(bins)
            bins.append([])
        bins[best].append(row)
        room[best] -= sizes[row]
        load[best] += costs[row]
    return bins


def _assign_to_ranks(bins: list[list[int]], costs: Sequence[float], num_ranks: int) -> Plan:
    """Bins to the passes of ranks: neighbours in cost run together, the most expensive of them on
    the rank that has least so far."""
    bins = bins + [[]] * (-len(bins) % num_ranks)
    loads = [sum(costs[i] for i in members) for members in bins]
    order = sorted(range(len(bins)), key=lambda b: (-loads[b], bins[b]))
    passes: Plan = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for start in range(0, len(order), num_ranks):
        ranks = sorted(range(num_ranks), key=lambda rank: (totals[rank], rank))
        for rank, b in zip(ranks, order[start : start + num_ranks], strict=True):
            passes[rank].append(sorted(bins[b]))
            totals[rank] += loads[b]
    return passes


def empty_batch(device: torch.device | str) -> MicroBatch:
    """What a rank without rows runs, so that it takes part in every collective of a pass: a
    sequence that belongs to no row, with weights of zero. It has no `ids`."""
    row = Trajectory(id="", token_ids=[0] * 4, loss_mask=[False, True, True, True])
    return replace(collate([row], [0.0], device), ids=())


_PER_TOKEN = ("advantages", "rollout_logprobs", "staleness", "old_logprobs", "ref_logprobs")


def check_rows(rows: Sequence[Trajectory]) -> None:
    """Raise ValueError, naming the row, where one trains its first token, which nothing predicts,
    or where a field is not set on all rows or none, with one value for each trained token."""
    for row in rows:
        if row.loss_mask and row.loss_mask[0]:
            raise ValueError(f"sequence {row.id!r} trains its first token: nothing predicts it")
    num_trained = [row.num_trained for row in rows]
    for name in _PER_TOKEN:
        values: list[Tensor | None] = [getattr(row, name) for row in rows]
        num_present = sum(value is not None for value in values)
        if num_present not in (0, len(rows)):
            raise ValueError(f"{name} is set on {num_present} of {len(rows)} rows; set all or none")
        for row, value, expected in zip(rows, values, num_trained, strict=True):
            if value is not None and value.shape != (expected,):
                raise ValueError(
                    f"{name} of sequence {row.id!r} has shape {tuple(value.shape)}; its loss mask "
                    f"trains {expected} tokens"
                )


def collate(
    rows: Sequence[Trajectory],
    weights: Sequence[float],
    device: torch.device | str,
) -> MicroBatch:
    """Lay rows end to end. `weights` holds one weight a row, carried by each of its trained tokens.

    Raises as `check_rows`.
    """
    check_rows(rows)
    device = torch.device(device)
    lengths = [row.num_tokens for row in rows]
    borders = np.concatenate([[0], np.cumsum(lengths)])
    token_ids = np.concatenate([np.asarray(row.token_ids, dtype=np.int64) for row in rows])
    positions = np.arange(len(token_ids)) - np.repeat(borders[:-1], lengths)
    mask = np.concatenate([np.asarray(row.loss_mask, dtype=bool) for row in rows])
    assert len(mask) == len(token_ids), f"{len(mask)=} {len(token_ids)=}"
    trained = np.flatnonzero(mask)
    num_trained = np.add.reduceat(mask.astype(np.int64), borders[:-1])

    def send(array: np.ndarray[Any, Any] | Tensor) -> Tensor:
        return to_device(torch.as_tensor(array), device)

    def per_token(name: str) -> Tensor | None:
        if getattr(rows[0], name) is None:
            return None
        return send(torch.cat([getattr(row, name) for row in rows]).float())

    return MicroBatch(
        input_ids=send(token_ids),
        position_ids=send(positions),
        cu_seqlens=send(borders.astype(np.int32)),
        max_seqlen=max(lengths),
        predict_index=send(trained - 1),
        labels=send(token_ids[trained]),
        sequence_index=send(np.repeat(np.arange(len(rows)), num_trained)),
        weights=send(np.repeat(np.asarray(weights, dtype=np.float32), num_trained)),
        **{name: per_token(name) for name in _PER_TOKEN},
        ids=tuple(row.id for row in rows),
        lengths=tuple(lengths),
    )


def on_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """The batch with its tensors on `device`, copied without waiting for it."""
    tensors = {f.name: v for f in fields(batch) if isinstance(v := getattr(batch, f.name), Tensor)}
    return replace(batch, **{name: to_device(tensor, device) for name, tensor in tensors.items()})


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor there; from host memory by way of pinned pages, so that nothing waits."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
