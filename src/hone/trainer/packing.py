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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hone.types import Extent, LossExtent, MicroBatch, Row

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
    "units_of",
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
    rows: Sequence[Row],
    *,
    max_tokens: int,
    num_ranks: int = 1,
    micro_batch_size: int | None = None,
    cost: Cost | None = None,
) -> Plan:
    """Cut rows into passes, equally many for each of `num_ranks`; deterministic.

    With `micro_batch_size` a pass takes at most that many rows, whatever their length; otherwise
    at most `max_tokens` tokens. Rows of a unit share a pass. As few passes as the cap allows are
    balanced by `cost` (default: tokens), the most expensive units first, each into the cheapest
    pass where it fits. Ranks wait for each other in every pass, so those that run at the same time
    are of like cost; the sums over a rank's passes are balanced after that. Passes without rows
    come last.

    Raises ValueError for a unit above the cap.
    """
    units = units_of(rows)
    lengths = [[rows[i].num_tokens for i in unit] for unit in units]
    capacity = max_tokens if micro_batch_size is None else micro_batch_size
    sizes = [sum(own) if micro_batch_size is None else len(own) for own in lengths]
    for unit, size in zip(units, sizes, strict=True):
        if size > capacity:
            raise ValueError(_too_large([rows[i] for i in unit], size, micro_batch_size, capacity))
    cost = cost or float
    costs = [sum(map(cost, own)) for own in lengths]
    num_passes = ceil(_fewest_bins(sizes, capacity) / num_ranks)
    while True:
        bins = _place(sizes, costs, capacity, num_passes * num_ranks)
        needed = ceil(len(bins) / num_ranks)
        if needed == num_passes:
            break
        num_passes = needed
    ranks = _assign_to_ranks(bins, costs, num_ranks)
    return [[sorted(i for unit in own for i in units[unit]) for own in passes] for passes in ranks]


def units_of(rows: Sequence[Row]) -> list[list[int]]:
    """Row indices of each unit, in the order of their first rows."""
    units: dict[str | int, list[int]] = {}
    for index, row in enumerate(rows):
        units.setdefault(row.unit or index, []).append(index)
    return list(units.values())


def _too_large(rows: Sequence[Row], size: int, micro_batch_size: int | None, capacity: int) -> str:
    names = " and ".join(repr(row.id) for row in rows)
    noun = f"sequence {names} has" if len(rows) == 1 else f"sequences {names} together have"
    if micro_batch_size is not None:
        return (
            f"{names} must share a micro-batch, and trainer.micro_batch_size is "
            f"{micro_batch_size}; raise it to {size}"
        )
    return (
        f"{noun} {size} tokens, more than the budget of {capacity} for one pass; raise "
        "trainer.max_tokens_per_microbatch (or max_tokens_per_forward), or shorten prompts or "
        "completions"
    )


def digest(rows: Sequence[Row], passes: Plan) -> str:
    """A few characters that differ where rows or plans do: by ids, lengths and order."""
    content = ([(row.id, row.num_tokens) for row in rows], passes)
    return hashlib.blake2b(repr(content).encode(), digest_size=8).hexdigest()


def _fewest_bins(sizes: Sequence[int], capacity: int) -> int:
    """A lower bound: of rows above `capacity / (k + 1)` a bin holds at most k."""
    large = (sum(size * (k + 1) > capacity for size in sizes) for k in range(1, 9))
    return max(ceil(sum(sizes) / capacity), *(ceil(n / k) for k, n in enumerate(large, start=1)))


def _place(
    sizes: Sequence[int], costs: Sequence[float], capacity: int, num_bins: int
) -> list[list[int]]:
    """Longest-processing-time placement into `num_bins` bins, or more where a unit fits in none."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = np.full(num_bins + len(sizes), capacity)
    load = np.zeros(num_bins + len(sizes))
    for row in sorted(range(len(sizes)), key=lambda i: (-costs[i], i)):
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
    row = Row(id="", token_ids=[0] * 4, loss_mask=[False, True, True, True])
    return replace(collate([row], [0.0], device), ids=())


def check_rows(rows: Sequence[Row]) -> None:
    """Raise ValueError, naming the row, where one trains its first token, which nothing predicts,
    or where a column is not there on all rows or none, alike, with a value for all that it is
    per."""
    for row in rows:
        if row.loss_mask and row.loss_mask[0]:
            raise ValueError(f"sequence {row.id!r} trains its first token: nothing predicts it")
    counts: list[dict[Extent, int]] = [
        {"trained": row.num_trained, "token": row.num_tokens, "row": 1} for row in rows
    ]
    for name in sorted({name for row in rows for name in row.columns}):
        having = [row for row in rows if name in row.columns]
        if len(having) < len(rows):
            raise ValueError(f"{name} is set on {len(having)} of {len(rows)} rows; set all or none")
        first = rows[0].columns[name]
        for row, expected in zip(rows, counts, strict=True):
            column = row.columns[name]
            if column.per != first.per or column.values.shape[1:] != first.values.shape[1:]:
                raise ValueError(
                    f"{name} of sequence {row.id!r} is per {column.per}, of shape "
                    f"{tuple(column.values.shape)}; that of {rows[0].id!r} is per {first.per}, of "
                    f"shape {tuple(first.values.shape)}"
                )
            if column.values.shape[:1] != (expected[column.per],):
                raise ValueError(
                    f"{name} of sequence {row.id!r} has shape {tuple(column.values.shape)}; "
                    f"{_expected(expected, column.per)}"
                )


def _expected(counts: Mapping[Extent, int], per: Extent) -> str:
    match per:
        case "trained":
            return f"its loss mask trains {counts[per]} tokens"
        case "token":
            return f"it has {counts[per]} tokens"
        case "row":
            return "a column per row has one value"


def collate(
    rows: Sequence[Row],
    weights: Sequence[float],
    device: torch.device | str,
    *,
    per: LossExtent = "trained",
) -> MicroBatch:
    """Lay rows end to end. `weights` holds one weight a row, carried by each of its trained tokens,
    by the row, or, that of its first row, by its unit, as `per` says.

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
    units = units_of(rows)
    unit_index = np.empty(len(rows), dtype=np.int64)
    for number, members in enumerate(units):
        unit_index[members] = number
    weights_S = np.asarray(weights, dtype=np.float32)
    carried = {"trained": np.repeat(weights_S, num_trained), "row": weights_S}
    carried["unit"] = weights_S[[members[0] for members in units]]

    def send(array: np.ndarray[Any, Any] | Tensor) -> Tensor:
        return to_device(torch.as_tensor(array), device)

    return MicroBatch(
        input_ids=send(token_ids),
        position_ids=send(positions),
        cu_seqlens=send(borders.astype(np.int32)),
        max_seqlen=max(lengths),
        predict_index=send(trained - 1),
        labels=send(token_ids[trained]),
        sequence_index=send(np.repeat(np.arange(len(rows)), num_trained)),
        unit_index=send(unit_index),
        num_units=len(units),
        weights=send(carried[per]),
        columns={
            name: send(torch.cat([row.columns[name].values for row in rows]))
            for name in rows[0].columns
        },
        ids=tuple(row.id for row in rows),
        lengths=tuple(lengths),
    )


def on_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """The batch with its tensors on `device`, copied without waiting for it."""
    tensors = {f.name: v for f in fields(batch) if isinstance(v := getattr(batch, f.name), Tensor)}
    return replace(
        batch,
        **{name: to_device(tensor, device) for name, tensor in tensors.items()},
        columns={name: to_device(tensor, device) for name, tensor in batch.columns.items()},
    )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor there; from host memory by way of pinned pages, so that nothing waits."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
