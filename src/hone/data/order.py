"""The order of an epoch of a source, of which only some rows are known at a time.

Blocks of rows are sorted by a keyed hash, as many as fill a *window* come together, and the rows of
a window are sorted by the keyed hash of their ids. So every place has its row without the places
before it, and a window of all rows is the order of `hone.data.row_source.epoch_order`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hone.data.hashing import keyed_hash

__all__ = ["BlockSizes", "EpochOrder", "Window"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizes:
    """Sizes of the blocks of a source, in the order of its files."""

    first_rows: Ints  # [b], number of a block's first row in the source
    num_rows: Ints  # [b]
    num_bytes: Ints  # [b], of its rows, unpacked

    @property
    def total_rows(self) -> int:
        """Rows of the source."""
        return int(self.num_rows.sum())

    @property
    def total_bytes(self) -> int:
        """Bytes of the source, unpacked."""
        return int(self.num_bytes.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """How many blocks come together: as many as hold no more rows and bytes, and at least one."""

    rows: int | None = None
    bytes: int | None = None

    def starts(self, blocks: BlockSizes, order: Ints) -> Ints:
        """Positions in `order` at which windows begin, [w]."""
        limits = ((blocks.num_rows, self.rows), (blocks.num_bytes, self.bytes))
        ends = [(np.cumsum(sizes[order]), most) for sizes, most in limits if most is not None]
        starts: list[int] = []
        start = 0
        while start < len(order):
            starts.append(start)
            stop = len(order)
            for end, most in ends:
                before = int(end[start - 1]) if start else 0
                stop = min(stop, int(np.searchsorted(end, before + most, side="right")))
            start = max(start + 1, stop)
        return np.array(starts, dtype=np.int64)


class EpochOrder:
    """Numbers of rows, from 0, by their place in the epoch."""

    def __init__(
        self,
        blocks: BlockSizes,
        *,
        seed: int,
        epoch: int,
        shuffle: bool,
        window: Window,
        row_id: Callable[[int], str],
    ) -> None:
        self._blocks, self._seed, self._epoch = blocks, seed, epoch
        self._row_id, self._shuffle = row_id, shuffle
        numbers = range(len(blocks.num_rows))
        if shuffle:
            numbers = sorted(numbers, key=lambda number: keyed_hash("block", seed, epoch, number))
        self._order: Ints = np.array(numbers, dtype=np.int64)
        self._starts = window.starts(blocks, self._order)
        rows = np.cumsum(blocks.num_rows[self._order])
        self._first_places: Ints = np.array(
            [0 if start == 0 else rows[start - 1] for start in self._starts], dtype=np.int64
        )
        self._known: tuple[int, Sequence[int]] = (-1, ())

    @property
    def num_windows(self) -> int:
        """Windows of the epoch."""
        return len(self._starts)

    def __len__(self) -> int:
        return self._blocks.total_rows

    def __getitem__(self, place: int) -> int:
        """The row at a place. Raises IndexError behind the last one."""
        if not 0 <= place < len(self):
            raise IndexError(place)
        if not self._shuffle:
            return place
        window, rows = self._window_of(place)
        return rows[place - int(self._first_places[window])]

    def rows_before(self, place: int) -> Iterator[tuple[int, NDArray[np.bool_] | None]]:
        """Blocks with the rows of all places before one, in an order of their own: which of the
        rows of a block they are, [rows of the block], or None for all."""
        if not self._shuffle:
            blocks = list(range(int(np.searchsorted(self._blocks.first_rows, place))))
            whole, rows = blocks[:-1], np.arange(place)
        else:
            window, ordered = self._window_of(place)
            whole = self._order[: self._starts[window]].tolist()
            blocks = [*whole, *self._blocks_of(window)]
            rows = np.sort(np.array(ordered[: place - int(self._first_places[window])], np.int64))
        for block in whole:
            yield block, None
        for block in blocks[len(whole) :]:
            first, number = int(self._blocks.first_rows[block]), int(self._blocks.num_rows[block])
            begin, end = np.searchsorted(rows, [first, first + number])
            if begin < end:
                mask = np.zeros(number, dtype=np.bool_)
                mask[rows[begin:end] - first] = True
                yield block, mask

    def _window_of(self, place: int) -> tuple[int, Sequence[int]]:
        """The number of the window of a place, and its rows in their order."""
        window = int(np.searchsorted(self._first_places, place, side="right")) - 1
        if self._known[0] != window:
            self._known = window, self._rows_of(window)
        return self._known

    def _blocks_of(self, window: int) -> list[int]:
        """Blocks of a window, in the order of the files."""
        bounds = [*self._starts.tolist(), len(self._order)]
        return sorted(self._order[bounds[window] : bounds[window + 1]].tolist())

    def _rows_of(self, window: int) -> list[int]:
        rows = [
            row
            for block in self._blocks_of(window)
            for row in range(
                int(self._blocks.first_rows[block]),
                int(self._blocks.first_rows[block] + self._blocks.num_rows[block]),
            )
        ]
        key = ("order", self._seed, self._epoch)
        return sorted(rows, key=lambda row: keyed_hash(*key, self._row_id(row)))
