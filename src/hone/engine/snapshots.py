"""Snapshots: which stored states belong to the beginnings of prompts.

A recurrent layer's state at the end of a prefix is what other sequences need to begin with it
(docs/design/hybrids.md). Snapshots lie in rows of the stored states behind those of the slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

__all__ = ["Snapshots"]


class Snapshots:
    """The row of each prefix with a stored state, by the prefix's chain id (`BlockManager`), in the
    order of their last use.

    A pass may write each row once, so rows that are taken in a step are not taken again before
    `next_step`. A row that a pass reads may be taken in the same step: all states are read before
    any is written.
    """

    def __init__(self, rows: Iterable[int]) -> None:
        self._rows = list(rows)
        self.clear()

    def clear(self) -> None:
        """Forget all states."""
        self._free = self._rows[::-1]
        self._row_of: OrderedDict[int, int] = OrderedDict()
        self._taken: set[int] = set()

    def next_step(self) -> None:
        """Begin a step: rows taken in the last one may be taken again."""
        self._taken.clear()

    def __contains__(self, chain: int) -> bool:
        return chain in self._row_of

    def use(self, chain: int) -> int:
        """The row of a prefix that has one, which is then the one used most recently."""
        self._row_of.move_to_end(chain)
        return self._row_of[chain]

    def take(self, chain: int) -> int | None:
        """A row for the state of a prefix that has none, in place of the one used least recently.
        None where all were taken in this step."""
        assert chain not in self._row_of, f"{chain=}"
        if self._free:
            row = self._free.pop()
        else:
            old = next((c for c, row in self._row_of.items() if row not in self._taken), None)
            if old is None:
                return None
            row = self._row_of.pop(old)
        self._row_of[chain] = row
        self._taken.add(row)
        return row
