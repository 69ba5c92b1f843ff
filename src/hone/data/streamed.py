"""A source that is read while a run draws from it.

    place ─► row number (`EpochOrder`) ─► row of a block ─► filters (`Sieve`) ─► prepared
                                                              └────► skipped ◄────┘

Rows are read and prepared some at a time, in a thread ahead of the place that is asked for
(`hone.data.ahead`). What is ahead is thrown away when a run ends: a place has the same row whenever
it is read.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Generic, ParamSpec, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hone.data import row_ids
from hone.data.ahead import Ahead, Part
from hone.data.duplicates import Digests, Hashes, Repeats
from hone.data.order import BlockSizes, EpochOrder, Window
from hone.data.row_filters import Sieve
from hone.data.row_source import Item, RowSource, Skipped, nothing_left
from hone.data.sources import SourceRow

__all__ = ["TOGETHER_ROWS", "IndexedRows", "Prepare", "StreamedRows"]

TOGETHER_ROWS, _TOGETHER_BYTES = 256, 2 << 20
"""Rows that are read and prepared together, and their bytes unpacked."""
_MAX_AHEAD_ROWS, _MAX_AHEAD_BYTES = 4096, 16 << 20
"""Rows that may be prepared before they are drawn. Token ids of a text take ten times its bytes."""
_WALKED_ROWS = 64
"""Rows that are read together where a few are wanted."""
_DIGESTED_ROWS = 4096
"""Rows that are read together where only their digests are wanted."""
_preparing = threading.Lock()
"""Rows are prepared by one thread at a time, of whatever source: what renders and filters them need
not be made for several."""

T = TypeVar("T", bound=Item)
P = ParamSpec("P")
R = TypeVar("R")
Prepare = Callable[[Sequence[SourceRow], Sequence[int]], Sequence[T | Skipped]]
"""From rows and their numbers, counted from 0 in the source, the rows of a run. Raises UserError
for a row that is wrong."""
Sift = Callable[[Sequence[SourceRow], Sequence[int]], Sequence[Skipped | None]]
"""From rows and their numbers what skips each before it is prepared, or None."""


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
        item_names: Sequence[str] = ("",),
        sieve: Sieve | None = None,
        in_thread: bool = False,
    ) -> None:
        """`item_names` are those of the items that each row has; `rows` and `prepare` then count
        items (`hone.data.items`). With `in_thread` a thread prepares rows before they are drawn."""
        self.name, self._item_names = name, item_names
        self._sieve = sieve
        self._repeats = Repeats(rows.sizes.total_rows, _weakly(self._hashes_before), name=name)
        self._rows, self._prepare = rows, prepare
        self._seed, self._shuffle, self._window = seed, shuffle, window
        self._order: tuple[int, EpochOrder] | None = None
        self._drawn_from: dict[int, T | Skipped] = {}
        """Rows by their places that were read last, over all epochs."""
        self._thread: Ahead[T | Skipped] | None = None
        if in_thread:
            self._thread = Ahead(
                self._made_from, max_bytes=_MAX_AHEAD_BYTES, max_rows=_MAX_AHEAD_ROWS
            )
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
        if read not in self._drawn_from:
            # What was read last may be asked for again, by a look ahead of it.
            near = {n: row for n, row in self._drawn_from.items() if n > read - TOGETHER_ROWS}
            self._drawn_from = near | self._read_ahead(read)
        return self._drawn_from[read]

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
        sift = self._sift(Digests().add)
        for start in range(0, self.num_rows, _WALKED_ROWS):
            numbers = range(start, min(start + _WALKED_ROWS, self.num_rows))
            yield numbers.stop, _drawn(self._prepared(numbers, prepare or self._prepare, sift))

    def _prepared(
        self, numbers: Sequence[int], prepare: Prepare[T], sift: Sift | None
    ) -> Sequence[T | Skipped]:
        """Rows by their numbers in the source."""
        with _preparing:
            rows = self._rows_of(numbers)
            if sift is None:
                return prepare(rows, numbers)
            skipped = sift(rows, numbers)
            kept = [place for place, why in enumerate(skipped) if why is None]
            own = [rows[place] for place in kept]
            made = iter(prepare(own, [numbers[place] for place in kept]))
            return [next(made) if why is None else why for why in skipped]

    def _rows_of(self, numbers: Sequence[int]) -> list[SourceRow]:
        blocks = self._rows.sizes
        places = self._blocks_of(numbers)
        found: dict[int, SourceRow] = {}
        for block in dict.fromkeys(places.tolist()):
            own = [n for n, place in zip(numbers, places, strict=True) if place == block]
            first = int(blocks.first_rows[block])
            rows = self._rows.rows(block, [number - first for number in own])
            found |= zip(own, rows, strict=True)
        return [found[number] for number in numbers]

    def _blocks_of(self, numbers: Sequence[int]) -> NDArray[np.int64]:
        """The block of each row."""
        return np.searchsorted(self._rows.sizes.first_rows, np.asarray(numbers), side="right") - 1

    def number_of(self, row_id: str) -> int | None:
        return row_ids.number_of(row_id, self.name, self.num_rows)

    def _read_ahead(self, read: int) -> dict[int, T | Skipped]:
        part = self._made_from(read) if self._thread is None else self._thread.part(read)
        for check in self._checks:
            check(_drawn(part.rows))
        return dict(enumerate(part.rows, start=read))

    def _made_from(self, read: int) -> Part[T | Skipped]:
        """Rows of an epoch, from the one that comes after so many."""
        epoch, place = divmod(read, self.num_rows)
        order = self._order_of(epoch)
        places = range(place, min(place + TOGETHER_ROWS, self.num_rows))
        numbers = [order[place] for place in places]
        own, sizes = self._blocks_of(numbers), self._rows.sizes
        num_bytes = np.cumsum(sizes.num_bytes[own] / sizes.num_rows[own])
        num_rows = max(1, int(np.searchsorted(num_bytes, _TOGETHER_BYTES, side="right")))
        sift = self._sift(partial(self._repeats.find, epoch, place))
        rows = self._prepared(numbers[:num_rows], self._prepare, sift)
        return Part(rows, read + len(rows), int(num_bytes[len(rows) - 1]))

    def _sift(self, repeats: Callable[[Hashes], NDArray[np.bool_]]) -> Sift | None:
        """What skips rows, with those of which `repeats` knows the digests."""
        sieve = self._sieve
        if sieve is None:
            return None
        return lambda rows, numbers: sieve.with_repeats(
            rows, lambda hashes: repeats(self._of_items(hashes, numbers))
        )

    def _of_items(self, hashes: Hashes, numbers: Sequence[int]) -> Hashes:
        """Digests of items with these numbers from those of their rows, [n]. Items of one row do
        not repeat each other."""
        items = np.asarray(numbers, dtype=np.uint64) % np.uint64(len(self._item_names))
        return np.where(hashes == 0, hashes, hashes ^ items)

    def _hashes_before(self, epoch: int, place: int) -> Iterator[Hashes]:
        """Digests of all places before one, by reading their rows again; block by block."""
        assert self._sieve is not None
        for block, wanted in self._order_of(epoch).rows_before(place):
            num_rows = int(self._rows.sizes.num_rows[block])
            for start in range(0, num_rows, _DIGESTED_ROWS):
                numbers = range(start, min(start + _DIGESTED_ROWS, num_rows))
                if wanted is None:
                    hashes = self._sieve.digests(self._rows.rows(block, numbers))
                    yield self._of_items(hashes, numbers)
                elif (some := np.flatnonzero(wanted[start : numbers.stop])).size:
                    # A range of rows is read faster than single ones.
                    rows = self._rows.rows(block, numbers)
                    hashes = self._sieve.digests([rows[place] for place in some])
                    yield self._of_items(hashes, [numbers[place] for place in some])

    def _order_of(self, epoch: int) -> EpochOrder:
        if self._order is None or self._order[0] != epoch:
            order = EpochOrder(
                self._rows.sizes,
                seed=self._seed,
                epoch=epoch,
                shuffle=self._shuffle,
                window=self._window,
                row_id=partial(_id_of, self.name, self._item_names),
            )
            self._order = epoch, order
        return self._order[1]


def _id_of(name: str, item_names: Sequence[str], number: int) -> str:
    """The id of a row, or of an item of one, by its number from 0. It is no method, since the order
    must not keep its source alive, whose thread ends with it."""
    row, item = divmod(number, len(item_names))
    return row_ids.row_id(name, row, item_names[item])


def _weakly(method: Callable[P, R]) -> Callable[P, R]:
    """A bound method that does not keep its object alive."""
    found = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = found()
        assert bound is not None
        return bound(*args, **kwargs)

    return call


def _drawn(rows: Sequence[T | Skipped]) -> list[T]:
    return [row for row in rows if not isinstance(row, Skipped)]
