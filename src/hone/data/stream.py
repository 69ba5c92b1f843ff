"""An endless, ordered stream of rows that can be stopped and resumed anywhere.

The position is two counters for each source: rows read, and rows served. They differ where a source
is read while it is drawn from, and rows are skipped on the way (`hone.data.streamed`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any, Generic, TypeVar

from hone.data.filters import REASONS
from hone.data.mixture import Mixture
from hone.data.row_source import Item, RowSource, Skipped, WholeRows, nothing_left
from hone.errors import UserError

__all__ = ["Stream"]

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Item)


def _content(item: Item) -> object:
    return item.id, item.token_ids


class Stream(Generic[T]):
    """Rows of one or several sources, epoch after epoch, without end.

    A source is a `RowSource`, or a sequence of all its rows. `weights` are the relative shares of
    the sources (default: equal). `seed`, `shuffle` and `content` are those of `WholeRows`, for
    sources that are sequences.
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
        self.sources = tuple(
            source
            if isinstance(source, RowSource)
            else WholeRows(source, seed=seed, shuffle=shuffle, content=content)
            for source in sources
        )
        self.seed = seed
        self.shuffle = shuffle
        self._mixture = Mixture(weights)
        self._read = [0] * len(self.sources)
        self._served = [0] * len(self.sources)
        self._skipped: Counter[str] = Counter()

    def __len__(self) -> int:
        """Rows over all sources, with those that are skipped while they are read."""
        return sum(source.num_rows for source in self.sources)

    def first_rows(self) -> list[T]:
        """All rows of the sources that are read whole, and some of each other one."""
        return [row for source in self.sources for row in source.first_rows()]

    def add_check(self, check: Callable[[Sequence[T]], None]) -> None:
        """Call `check` with rows that are read later, before they are drawn. It raises UserError
        for a row that the run cannot use."""
        for source in self.sources:
            source.add_check(check)

    @property
    def counts(self) -> dict[str, int]:
        """How many rows were read so far from sources that are read as rows are drawn, and skipped
        by reason; empty without such a source."""
        if not any(source.is_streamed for source in self.sources):
            return {}
        num_read = sum(
            num for num, source in zip(self._read, self.sources, strict=True) if source.is_streamed
        )
        return {"rows_read": num_read, **{f"skipped_{x}": n for x, n in self._skipped.items()}}

    def take(self, num: int) -> list[T]:
        """The next `num` rows. Raises UserError where a source has no row that is served, and for a
        row that is read and is wrong."""
        if not self.sources or not all(source.num_rows for source in self.sources):
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
        number = self._mixture.next_source(self._served)
        source = self.sources[number]
        # Of two epochs, the first may serve its rows early and the second late.
        for _ in range(2 * source.num_rows):
            row = source.row(self._read[number])
            self._read[number] += 1
            if not isinstance(row, Skipped):
                self._served[number] += 1
                return row
            self._skip(row)
        raise nothing_left(source)

    def _skip(self, row: Skipped) -> None:
        """Count a row, and log the first of each reason."""
        self._skipped[row.reason] += 1
        if self._skipped[row.reason] == 1 and row.reason in REASONS:
            logger.warning(
                "a row was skipped, since %s: %s; further ones are counted in data/skipped_%s",
                REASONS[row.reason].of_one,
                row.where,
                row.reason,
            )

    @cached_property
    def _identity(self) -> dict[str, Any]:
        digest = blake2b(digest_size=16)
        for source in self.sources:
            for value in source.identity:
                digest.update(repr(value).encode())
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "shares": [str(share) for share in self._mixture.shares],
            "num_rows": [source.num_rows for source in self.sources],
            "fingerprint": digest.hexdigest(),
        }
