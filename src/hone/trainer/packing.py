"""Packing plan: the sequences that share each forward pass of each rank.

    for indices in plan(rows, num_ranks=4, max_tokens=16384)[rank]:
        batch = collate([rows[i] for i in indices], [weights[i] for i in indices], device)

A pass never holds more than `max_tokens` tokens. Within that cap passes are balanced by estimated
FLOPs, since attention makes one long sequence more expensive than many short ones with the same
number of tokens in all.

The plan is a pure function of the rows, so every rank that holds all rows computes all of
it and needs no message; `digest` is what ranks compare before they rely on that.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from operator import itemgetter
from statistics import fmean

import numpy as np

from hone.prefixes import COPIED, saved_tokens
from hone.trainer.prefixes import sharers_of
from hone.types import Row

__all__ = ["AttentionCost", "Cost", "Plan", "digest", "plan", "units_of"]

Cost = Callable[[int], float]
"""Relative time of a forward pass over one sequence of a given number of tokens; must not
decrease."""

Plan = list[list[list[int]]]
"""Row indices of each pass of each rank; all ranks have the same number of passes."""

_HALVINGS = 12
"""Number of bisections of the range of the fullest pass's cost."""


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """FLOPs of a sequence's forward pass: linear in its tokens, plus causal attention."""

    per_token: float
    per_token_squared: float

    @classmethod
    def of(
        cls, *, num_parameters: int, num_layers: int, attention_width: int, recurrence: int = 0
    ) -> AttentionCost:
        """`attention_width` is query heads times head size, `num_layers` the number of layers with
        attention. Scores and values cost `4 * width * n^2 / 2` FLOPs a layer, matrices 2 FLOPs a
        parameter and token, recurrent layers `recurrence` FLOPs a token in addition."""
        return cls(2.0 * num_parameters + recurrence, 2.0 * num_layers * attention_width)

    def __call__(self, num_tokens: int) -> float:
        return self.per_token * num_tokens + self.per_token_squared * num_tokens**2


@dataclass(frozen=True, slots=True)
class _Item:
    """Rows that must share a pass: those of a unit."""

    rows: list[int]
    group: str
    size: int
    """Size in the unit of the cap, without the group's prefix."""
    cost: float
    prefix_size: int = 0
    """Additional size of the group's prefix, for the first item of a group in a pass."""
    prefix_cost: float = 0.0


def plan(
    rows: Sequence[Row],
    *,
    max_tokens: int,
    num_ranks: int = 1,
    micro_batch_size: int | None = None,
    cost: Cost | None = None,
    prefixes: Sequence[int] | None = None,
) -> Plan:
    """Cut rows into passes, the same number for each of `num_ranks`; deterministic.

    With `micro_batch_size` a pass takes at most that many rows, whatever their length; otherwise at
    most `max_tokens` tokens. Rows of a unit share a pass. As few passes as the cap allows are
    balanced by `cost` (default: tokens), the most expensive units first, each into the cheapest
    pass where it fits. Ranks wait for each other in every pass, so passes that run at the same time
    have similar costs; the sums over a rank's passes are balanced after that. Passes without rows
    come last.

    With `prefixes`, of `shared_prefixes`, another plan is made, whose passes are filled group by
    group until each has its share of the cost; the one that takes less time is returned.

    Raises ValueError for a unit above the cap.
    """
    counts_rows = micro_batch_size is not None
    capacity = micro_batch_size if micro_batch_size is not None else max_tokens
    cost = cost or float
    apart = _items(rows, [0] * len(rows), cost, counts_rows=counts_rows)
    if prefixes is None or not any(prefixes):
        _require_fitting(rows, apart, micro_batch_size, capacity)
        return _balanced(apart, capacity, num_ranks)[1]
    together = _items(rows, prefixes, cost, counts_rows=counts_rows)
    _require_fitting(rows, together, micro_batch_size, capacity)
    candidates = [_filled(together, capacity, num_ranks)]
    if all(item.size <= capacity for item in apart):
        candidates.append(_balanced(apart, capacity, num_ranks))
    return min(candidates, key=itemgetter(0))[1]


def _items(
    rows: Sequence[Row], prefixes: Sequence[int], cost: Cost, *, counts_rows: bool
) -> list[_Item]:
    items: list[_Item] = []
    for unit in units_of(rows):
        first, prefix = rows[unit[0]], prefixes[unit[0]]
        saved, saved_cost = saved_tokens(prefix), (1 - COPIED) * cost(prefix) if prefix else 0.0
        tokens = sum(rows[i].num_tokens for i in unit) - len(unit) * saved
        items.append(
            _Item(
                unit,
                sharers_of(first) if prefix else "",
                len(unit) if counts_rows else tokens,
                sum(cost(rows[i].num_tokens) for i in unit) - len(unit) * saved_cost,
                0 if counts_rows else saved,
                saved_cost,
            )
        )
    return items


def _require_fitting(
    rows: Sequence[Row], items: Sequence[_Item], micro_batch_size: int | None, capacity: int
) -> None:
    for item in items:
        size = item.size + item.prefix_size
        if size > capacity:
            own = [rows[i] for i in item.rows]
            raise ValueError(_too_large(own, size, micro_batch_size, capacity))


def _balanced(items: Sequence[_Item], capacity: int, num_ranks: int) -> tuple[float, Plan]:
    """The time and the plan of items whose rows share nothing."""
    sizes, costs = [item.size for item in items], [item.cost for item in items]
    num_passes = ceil(_fewest_bins(sizes, capacity) / num_ranks)
    while True:
        bins = _place(sizes, costs, capacity, num_passes * num_ranks)
        needed = ceil(len(bins) / num_ranks)
        if needed == num_passes:
            break
        num_passes = needed
    loads = [sum(costs[i] for i in members) for members in bins]
    return _assign_to_ranks(
        [sorted(row for i in members for row in items[i].rows) for members in bins],
        loads,
        num_ranks,
    )


def _filled(items: Sequence[_Item], capacity: int, num_ranks: int) -> tuple[float, Plan]:
    """The time and the plan of items whose rows share the prefix of their group: passes are filled
    one after the other, so that few groups lie in two, up to the least cost with which they are as
    few as the cap allows."""
    groups: defaultdict[str | int, list[_Item]] = defaultdict(list)
    for number, item in enumerate(items):
        groups[item.group or number].append(item)
    in_order = [
        item
        for own in sorted(
            groups.values(), key=lambda own: (-fmean(i.cost for i in own), own[0].rows)
        )
        for item in sorted(own, key=lambda i: (-i.cost, i.rows))
    ]
    bins, loads = _fill(in_order, capacity, math.inf)
    most = ceil(len(bins) / num_ranks) * num_ranks
    low, high = sum(loads) / most if most else 0.0, max(loads, default=0.0)
    for _ in range(_HALVINGS):
        limit = (low + high) / 2
        filled = _fill(in_order, capacity, limit)
        if len(filled[0]) <= most:
            (bins, loads), high = filled, limit
        else:
            low = limit
    return _assign_to_ranks(bins, loads, num_ranks)


def _fill(
    items: Sequence[_Item], capacity: int, limit: float
) -> tuple[list[list[int]], list[float]]:
    """Rows and cost of each bin. A bin ends before an item that would exceed the cap or `limit`."""
    bins: list[list[int]] = []
    loads: list[float] = []
    room, group = 0, ""
    for item in items:
        is_there = bool(item.group) and item.group == group
        size = item.size + (0 if is_there else item.prefix_size)
        cost = item.cost + (0.0 if is_there else item.prefix_cost)
        if not bins or size > room or loads[-1] + cost > limit:
            bins.append([])
            loads.append(0.0)
            room, size, cost = capacity, item.size + item.prefix_size, item.cost + item.prefix_cost
        bins[-1] += item.rows
        loads[-1] += cost
        room, group = room - size, item.group
    return [sorted(own) for own in bins], loads


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
    """A short hash of rows (ids, lengths, order) and plan, by which ranks compare them."""
    content = ([(row.id, row.num_tokens) for row in rows], passes)
    return hashlib.blake2b(repr(content).encode(), digest_size=8).hexdigest()


def _fewest_bins(sizes: Sequence[int], capacity: int) -> int:
    """A lower bound on the number of bins: a bin has room for at most k rows above `capacity / (k +
    1)`."""
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


def _assign_to_ranks(
    bins: Sequence[list[int]], loads: Sequence[float], num_ranks: int
) -> tuple[float, Plan]:
    """The time (in the unit of costs) and the plan of bins assigned to ranks: bins of neighbouring
    costs run at the same time, the most expensive of them on the rank with the smallest sum so
    far."""
    padding = -len(bins) % num_ranks
    bins, loads = [*bins, *([] for _ in range(padding))], [*loads, *[0.0] * padding]
    order = sorted(range(len(bins)), key=lambda b: (-loads[b], bins[b]))
    passes: Plan = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for start in range(0, len(order), num_ranks):
        ranks = sorted(range(num_ranks), key=lambda rank: (totals[rank], rank))
        for rank, b in zip(ranks, order[start : start + num_ranks], strict=True):
            passes[rank].append(bins[b])
            totals[rank] += loads[b]
    return sum(loads[b] for b in order[::num_ranks]), passes
