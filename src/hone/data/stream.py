"""An endless, ordered stream of rows that can be stopped and resumed anywhere.

The order depends only on (seed, epoch, row ids): each epoch of each source sorts the row ids by a
keyed hash. So the position is two counters for each source: rows read, and rows served. They differ
where a source is read while it is drawn from, and rows are skipped on the way
(`hone.data.streamed`).

Several sources are interleaved by weight. The j-th row of a source with share w may come no
earlier than draw floor(j / w) and no later than draw ceil((j + 1) / w) - 1. Taking the row with the
earliest deadline among those allowed so far always meets these windows (Baruah et al.,
Proportionate Progress, Algorithmica 1996). So after k draws each source has given more than
k w - 1 and fewer than k w + 1 rows.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from hashlib import blake2b
from typing import Any, Generic, Protocol, TypeVar

from hone.data.hashing import keyed_hash
from hone.errors import UserError

__all__ = ["Item", "RowSource", "Skipped", "Stream", "epoch_order", "nothing_left"]


logger = logging.getLogger(__name__)


class Item(Protocol):
    """The fields of a row that a stream needs."""

    @property
    def id(self) -> str: ...

    @property
    def token_ids(self) -> Sequence[int]: ...


T = TypeVar("T", bound=Item)


def epoch_order(ids: Sequence[str], *, seed: int, epoch: int, shuffle: bool = True) -> list[int]:
    """Indices into `ids` in the order of epoch number `epoch`."""
    if not shuffle:
        return list(range(len(ids)))
    return sorted(range(len(ids)), key=lambda index: keyed_hash("order", seed, epoch, ids[index]))


def _content(item: Item) -> object:
    return item.id, item.token_ids


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that was read and is not drawn."""

    reason: str
    """`too_long`, `image`, or `held_out`."""
    where: str
    """For messages: its place, with what is wrong."""


_REASONS = {"too_long": "it is too long", "image": "an image of it cannot be read"}
"""Those worth a line; rows that are held out are skipped on purpose."""


class RowSource(ABC, Generic[T]):
    """A source whose rows are read while it is drawn from."""

    name: str
    """For messages."""

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Rows of an epoch, with those that are skipped."""

    @abstractmethod
    def row(self, read: int) -> T | Skipped:
        """The row that comes after so many rows read, over all epochs."""

    @abstractmethod
    def first_rows(self) -> Sequence[T]:
        """Some rows, for checks before a run. Raises UserError where there are none."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """By which `Stream.load_state_dict` recognises the source."""


class Stream(Generic[T]):
    """Rows of one or several sources, epoch after epoch, without end.

    A source is a sequence of all its rows, or a `RowSource`. `weights` are the relative shares of
    the sources (default: equal). `content` returns the part of a row that enters the fingerprint,
    by which `load_state_dict` recognises the data.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[T] | RowSource[T]],
        *,
        seed: int,
        weights: Sequence[float] | None = None,
        shuffle: bool = True,
        content: Callable[[T], object] = _content,
    ) -> None:
        weights = [1.0] * len(sources) if weights is None else weights
        assert len(weights) == len(sources), f"{len(weights)=} {len(sources)=}"
        if not all(0 < weight < math.inf for weight in weights):
            raise UserError(f"source weights must be positive and finite, got {list(weights)}")
        self.sources = tuple(
            source if isinstance(source, RowSource) else tuple(source) for source in sources
        )
        self.seed = seed
        self.shuffle = shuffle
        exact = [Fraction(str(weight)) for weight in weights]
        self.shares = tuple(weight / sum(exact) for weight in exact)
        self._content = content
        self._read = [0] * len(self.sources)
        self._served = [0] * len(self.sources)
        self._skipped: Counter[str] = Counter()
        self._orders: dict[int, tuple[int, list[int]]] = {}

    def __len__(self) -> int:
        """Rows over all sources, with those that are skipped while they are read."""
        return sum(map(_num_rows, self.sources))

    def first_rows(self) -> list[T]:
        """All rows of the sources that are read whole, and some of each other one."""
        return [
            row
            for source in self.sources
            for row in (source.first_rows() if isinstance(source, RowSource) else source)
        ]

    @property
    def counts(self) -> dict[str, int]:
        """How many rows were read so far from sources that are read as rows are drawn, and skipped
        by reason; empty without such a source."""
        kinds = [isinstance(source, RowSource) for source in self.sources]
        if not any(kinds):
            return {}
        num_read = sum(num for num, is_read in zip(self._read, kinds, strict=True) if is_read)
        return {"rows_read": num_read, **{f"skipped_{x}": n for x, n in self._skipped.items()}}

    def take(self, num: int) -> list[T]:
        """The next `num` rows. Raises UserError where a source has no row that is served, and for a
        row that is read and is wrong."""
        if not self.sources or not all(map(_num_rows, self.sources)):
            raise UserError("there are no rows to train on; name a data set in `data.train`")
        return [self._draw() for _ in range(num)]

    def peek(self, num: int) -> list[T]:
        """The rows that `take` gives next."""
        before = list(self._read), list(self._served), Counter(self._skipped)
        rows = self.take(num)
        self._read, self._served, self._skipped = before
        return rows

    def state_dict(self) -> dict[str, Any]:
        """The position, with the fingerprint of the data, as small JSON values."""
        position = {"read": list(self._read), "served": list(self._served)}
        return {**self._identity, **position, "skipped": dict(self._skipped)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raises UserError if it belongs to other data."""
        for key, value in self._identity.items():
            if state[key] != value:
                raise UserError(
                    f"the saved data position belongs to other data: {key} was {state[key]!r} "
                    f"and is now {value!r}. Restore the data settings of that run, or start anew "
                    "in another `run.dir`."
                )
        # Checkpoints from before sources could be streamed have one counter a source.
        self._read = [int(number) for number in state.get("read", state.get("drawn", ()))]
        self._served = [int(number) for number in state.get("served", self._read)]
        self._skipped = Counter(state.get("skipped", {}))

    def _draw(self) -> T:
        number = self._next_source()
        source = self.sources[number]
        # Of two epochs, the first may serve its rows early and the second late.
        for _ in range(2 * _num_rows(source)):
            row = self._row(number, source)
            self._read[number] += 1
            if not isinstance(row, Skipped):
                self._served[number] += 1
                return row
            self._skip(row)
        assert isinstance(source, RowSource)
        raise nothing_left(source)

    def _skip(self, row: Skipped) -> None:
        """Count a row, and log the first of each reason."""
        self._skipped[row.reason] += 1
        if self._skipped[row.reason] == 1 and row.reason in _REASONS:
            logger.warning(
                "a row was skipped, since %s: %s; further ones are counted in data/skipped_%s",
                _REASONS[row.reason],
                row.where,
                row.reason,
            )

    def _row(self, number: int, source: Sequence[T] | RowSource[T]) -> T | Skipped:
        read = self._read[number]
        if isinstance(source, RowSource):
            return source.row(read)
        epoch, index = divmod(read, len(source))
        return source[self._order(number, epoch, source)[index]]

    def _next_source(self) -> int:
        draws = sum(self._served) + 1
        allowed = (
            (Fraction(served + 1) / share, number)
            for number, (served, share) in enumerate(zip(self._served, self.shares, strict=True))
            if served < share * draws
        )
        return min(allowed)[1]

    def _order(self, number: int, epoch: int, source: Sequence[T]) -> list[int]:
        known = self._orders.get(number)
        if known is None or known[0] != epoch:
            ids = [item.id for item in source]
            known = (epoch, epoch_order(ids, seed=self.seed, epoch=epoch, shuffle=self.shuffle))
            self._orders[number] = known
        return known[1]

    @cached_property
    def _identity(self) -> dict[str, Any]:
        digest = blake2b(digest_size=16)
        for source in self.sources:
            if isinstance(source, RowSource):
                digest.update(source.fingerprint.encode())
                continue
            for item in source:
                digest.update(repr(self._content(item)).encode())
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "shares": [str(share) for share in self.shares],
            "num_rows": [_num_rows(source) for source in self.sources],
            "fingerprint": digest.hexdigest(),
        }


def nothing_left(source: RowSource[Any]) -> UserError:
    """The error of a source whose rows are all dropped."""
    return UserError(
        f"{source.name}: all {source.num_rows:,} rows were read, and none is left: `hone data "
        "check` shows why"
    )


def _num_rows(source: Sequence[Any] | RowSource[Any]) -> int:
    return source.num_rows if isinstance(source, RowSource) else len(source)
