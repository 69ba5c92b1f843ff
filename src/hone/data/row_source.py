"""A source of rows, epoch after epoch: what a stream draws from.

The order of a source is a pure function of (seed, epoch, row ids), so that a position in it is a
number of rows read, over all epochs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

from hone.data.hashing import keyed_hash
from hone.errors import UserError

__all__ = ["Item", "RowSource", "Skipped", "WholeRows", "epoch_order", "nothing_left"]


class Item(Protocol):
    """The fields of a row that a stream needs."""

    @property
    def id(self) -> str: ...

    @property
    def token_ids(self) -> Sequence[int]: ...


T = TypeVar("T", bound=Item)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that was read and is not drawn."""

    reason: str
    """`held_out`, `resting`, or a name of `hone.data.filters.REASONS`."""
    where: str
    """For messages: its place, with what is wrong."""


class RowSource(ABC, Generic[T]):
    """Rows in an order of their own for each epoch."""

    name: str
    """For messages."""
    is_streamed: bool
    """Whether rows are read while the run draws them."""

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Rows of an epoch, with those that are skipped."""

    @abstractmethod
    def row(self, read: int) -> T | Skipped:
        """The row that comes after so many rows read, over all epochs. Raises UserError for a row
        that is wrong."""

    @abstractmethod
    def number_of(self, row_id: str) -> int | None:
        """The number, from 0, of the row with this id, the same in every epoch; None where no row
        has it."""

    @abstractmethod
    def first_rows(self) -> Sequence[T]:
        """The rows that are known before a run. Raises UserError where there are none."""

    @abstractmethod
    def add_check(self, check: Callable[[Sequence[T]], None]) -> None:
        """Call `check` with rows that are read later, before they are drawn. It raises UserError
        for a row that the run cannot use."""

    @property
    @abstractmethod
    def identity(self) -> Sequence[object]:
        """Values by which `Stream.load_state_dict` recognises the source."""


class WholeRows(RowSource[T], Generic[T]):
    """Rows that are all in memory. `content` is the part of a row that enters the identity.
    `difficulties` are by id; easier rows of an epoch come first."""

    name = "the source"
    is_streamed = False

    def __init__(
        self,
        rows: Sequence[T],
        *,
        seed: int,
        shuffle: bool,
        content: Callable[[T], object],
        difficulties: Mapping[str, float] | None = None,
    ) -> None:
        self._rows = tuple(rows)
        known = difficulties or {}
        self._difficulties = [known[row.id] for row in self._rows if row.id in known]
        assert len(self._difficulties) in (0, len(self._rows)), "of all rows or none"
        self._seed, self._shuffle, self._content = seed, shuffle, content
        self._order: tuple[int, list[int]] | None = None

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def row(self, read: int) -> T:
        epoch, place = divmod(read, len(self._rows))
        if self._order is None or self._order[0] != epoch:
            ids = [row.id for row in self._rows]
            order = epoch_order(ids, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
            if self._difficulties:  # the sort is stable
                order.sort(key=self._difficulties.__getitem__)
            self._order = epoch, order
        return self._rows[self._order[1][place]]

    def number_of(self, row_id: str) -> int | None:
        return self._numbers.get(row_id)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {row.id: number for number, row in enumerate(self._rows)}

    def first_rows(self) -> Sequence[T]:
        return self._rows

    def add_check(self, check: Callable[[Sequence[T]], None]) -> None:
        """Nothing is read later."""

    @property
    def identity(self) -> Sequence[object]:
        return [*(self._content(row) for row in self._rows), *self._difficulties]


def epoch_order(ids: Sequence[str], *, seed: int, epoch: int, shuffle: bool = True) -> list[int]:
    """Indices into `ids` in the order of epoch number `epoch`."""
    if not shuffle:
        return list(range(len(ids)))
    return sorted(range(len(ids)), key=lambda index: keyed_hash("order", seed, epoch, ids[index]))


def nothing_left(source: RowSource[Any]) -> UserError:
    """The error of a source whose rows are all dropped."""
    return UserError(
        f"{source.name}: all {source.num_rows:,} rows were read, and none is left: `hone data "
        "check` shows why"
    )
