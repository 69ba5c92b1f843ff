"""A source that is read while a run draws from it.

    place ─► row number (`EpochOrder`) ─► row of a block ─► prepared, or skipped

Rows are read and prepared some at a time, ahead of the place that is asked for. What is ahead is
thrown away when a run ends: a place has the same row whenever it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from hone.data.order import BlockSizes, EpochOrder, Window
from hone.data.row_source import Item, RowSource, Skipped, nothing_left
from hone.data.sources import SourceRow

__all__ = ["AHEAD_ROWS", "IndexedRows", "Prepare", "StreamedRows"]

AHEAD_ROWS = 256
"""Rows that are read and prepared together."""
_WALKED_ROWS = 64
"""Rows that are read together where a few are wanted."""

T = TypeVar("T", bound=Item)
Prepare = Callable[[Sequence[SourceRow], Sequence[int]], Sequence[T | Skipped]]
"""From rows and their numbers, counted from 0 in the source, the rows of a run. Raises UserError
for a row that is wrong."""


class IndexedRows(Protocol):
    """The part of `hone.data.index.SourceIndex` that is needed here."""

    @property
    def sizes(self) -> BlockSizes: ...

    @property
    def fingerprint(self) -> str:
        """Of files and blocks."""
        ...

    def rows(self, block: int, numbers: Sequence[int], /) -> list[SourceRow]:
        """Rows of a block, by their numbers within it."""
        ...


class StreamedRows(RowSource[T], Generic[T]):
    """The rows of an index in the order of each epoch, prepared when they are drawn."""

    is_streamed = True

    def __init__(
        self,
        rows: IndexedRows,
        prepare: Prepare[T],
        *,
        name: str,
        seed: int,
        shuffle: bool,
        window: Window,
    ) -> None:
        self.name = name
        self._rows, self._prepare = rows, prepare
        self._seed, self._shuffle, self._window = seed, shuffle, window
        self._order: tuple[int, EpochOrder] | None = None
        self._ahead: dict[int, T | Skipped] = {}
        self._first: list[T] = []
        self._checks: list[Callable[[Sequence[T]], None]] = []

    @property
    def num_rows(self) -> int:
        return self._rows.sizes.total_rows

    @property
    def identity(self) -> Sequence[object]:
        return [(self._rows.fingerprint, self.name, self._window)]

    def add_check(self, check: Callable[[Sequence[T]], None]) -> None:
        self._checks.append(check)

    def row(self, read: int) -> T | Skipped:
        if read not in self._ahead:
            # What was read last may be asked for again, by a look ahead of it.
            near = {place: row for place, row in self._ahead.items() if place > read - AHEAD_ROWS}
            self._ahead = near | self._read_ahead(read)
        return self._ahead[read]

    @property
    def windows(self) -> str:
        """How rows are shuffled, for the log."""
        if not self._shuffle:
            return ", in the order of the file"
        num_windows = self._order_of(0).num_windows
        if num_windows == 1:
            return ", all shuffled together"
        return f", shuffled in {num_windows:,} windows of about {self.num_rows // num_windows:,}"

    def first_rows(self) -> list[T]:
        if not self._first:
            self._first = next((rows for _, rows in self.walk() if rows), [])
        if not self._first:
            raise nothing_left(self)
        return self._first

    def walk(self, prepare: Prepare[T] | None = None) -> Iterator[tuple[int, list[T]]]:
        """The rows in the order of the files, some at a time: how many have been read, and those
        that are not skipped. They are made by `prepare` in place of the source's own."""
        for start in range(0, self.num_rows, _WALKED_ROWS):
            numbers = range(start, min(start + _WALKED_ROWS, self.num_rows))
            yield numbers.stop, _drawn(self._prepared(numbers, prepare or self._prepare))

    def _prepared(self, numbers: Sequence[int], prepare: Prepare[T]) -> Sequence[T | Skipped]:
        """Rows by their numbers in the source."""
        blocks = self._rows.sizes
        places = np.searchsorted(blocks.first_rows, np.asarray(numbers), side="right") - 1
        found: dict[int, SourceRow] = {}
        for block in dict.fromkeys(places.tolist()):
            own = [n for n, place in zip(numbers, places, strict=True) if place == block]
            first = int(blocks.first_rows[block])
            rows = self._rows.rows(block, [number - first for number in own])
            found |= zip(own, rows, strict=True)
        return prepare([found[number] for number in numbers], numbers)

    def row_id(self, number: int) -> str:
        """The id of a row by its number from 0; ids count from 1."""
        return f"{self.name}:{number + 1}"

    def number_of(self, row_id: str) -> int | None:
        name, _, number = row_id.rpartition(":")
        is_own = name == self.name and number.isdecimal() and 0 < int(number) <= self.num_rows
        return int(number) - 1 if is_own else None

    def _read_ahead(self, read: int) -> dict[int, T | Skipped]:
        epoch, place = divmod(read, self.num_rows)
        order = self._order_of(epoch)
        places = range(place, min(place + AHEAD_ROWS, self.num_rows))
        rows = self._prepared([order[place] for place in places], self._prepare)
        for check in self._checks:
            check(_drawn(rows))
        return dict(enumerate(rows, start=read))

    def _order_of(self, epoch: int) -> EpochOrder:
        if self._order is None or self._order[0] != epoch:
            order = EpochOrder(
                self._rows.sizes,
                seed=self._seed,
                epoch=epoch,
                shuffle=self._shuffle,
                window=self._window,
                row_id=self.row_id,
            )
            self._order = epoch, order
        return self._order[1]


def _drawn(rows: Sequence[T | Skipped]) -> list[T]:
    return [row for row in rows if not isinstance(row, Skipped)]
