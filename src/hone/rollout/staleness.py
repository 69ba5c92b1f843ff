"""The choice of the groups that an update trains, each of which has a deadline."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["choose", "too_late"]


def choose(
    deadlines: Sequence[int],
    is_complete: Sequence[bool],
    *,
    update: int,
    size: int,
    may_be_fewer: bool = False,
) -> list[int] | None:
    """Positions of the groups that `update` trains, at most `size`; None where it must wait.

    `deadlines[i]` is the last update that may train group i; they ascend. Complete groups are
    taken, earliest deadline first, if there are `size` of them (or with `may_be_fewer`) and all
    other groups can still meet their deadlines, `size` of them in each later update. No other
    choice leaves fewer groups due by any deadline, so where this choice must wait, every choice
    must (earliest deadline first; Liu and Layland, Journal of the ACM 1973).
    """
    chosen = [position for position, complete in enumerate(is_complete) if complete][:size]
    if len(chosen) < size and not may_be_fewer:
        return None
    taken = set(chosen)
    left = [due for position, due in enumerate(deadlines) if position not in taken]
    return None if too_late(left, update=update + 1, size=size) else chosen


def too_late(deadlines: Sequence[int], *, update: int, size: int) -> list[int]:
    """Positions of the groups that miss their deadlines even if all are complete when needed.

    `deadlines` ascend; `size` groups are trained in `update` and in each one after it.
    """
    late: list[int] = []
    for position, due in enumerate(deadlines):
        num_before = position - len(late)
        if due < update + num_before // size:
            late.append(position)
    return late
