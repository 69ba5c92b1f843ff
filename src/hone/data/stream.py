"""An endless, ordered stream of rows that can be stopped and resumed anywhere.

The position is two counters for each source: rows read, and rows served. They differ where a source
is read while it is drawn from, and rows are skipped on the way (`hone.data.streamed`), and where
rows rest, for which a table of their pass rates is added (`hone.data.curriculum`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from hashlib import blake2b
from typing import Any, Generic, TypeVar

import numpy as np

from hone.data.curriculum import PassRates, Role
from hone.data.mixture import Mixture
from hone.data.row_source import Item, RowSource, Skipped, WholeRows, nothing_left
from hone.data.settings import CurriculumConfig
from hone.errors import UserError

__all__ = ["Stream"]

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Item)

_REASONS = {"too_long": "it is too long", "image": "an image of it cannot be read"}
"""Those worth a line; rows that are held out or rest are skipped on purpose."""


def _content(item: Item) -> object:
    return item.id, item.token_ids


class Stream(Generic[T]):
    """Rows of one or several sources, epoch after epoch, without end.

    A source is a `RowSource`, or a sequence of all its rows. `weights` are the relative shares of
    the sources (default: equal). `seed`, `shuffle` and `content` are those of `WholeRows`, for
    sources that are sequences. `numbers` are what columns say of their rows, by role and row id.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[T] | RowSource[T]],
        *,
        seed: int,
        weights: Sequence[float] | None = None,
        shuffle: bool = True,
        content: Callable[[T], object] = _content,
        numbers: Mapping[Role, Mapping[str, float]] | None = None,
    ) -> None:
        weights = [1.0] * len(sources) if weights is None else weights
        assert len(weights) == len(sources), f"{len(weights)=} {len(sources)=}"
        numbers = numbers or {}
        self.sources = tuple(
            source
            if isinstance(source, RowSource)
            else WholeRows(
                source,
                seed=seed,
                shuffle=shuffle,
                content=content,
                difficulties=numbers.get("difficulty"),
            )
            for source in sources
        )
        self.seed = seed
        self.shuffle = shuffle
        self._mixture = Mixture(weights)
        self._read = [0] * len(self.sources)
        self._served = [0] * len(self.sources)
        self._skipped: Counter[str] = Counter()
        self._known_rates = numbers.get("pass_rate", {})
        self._rates: tuple[PassRates, ...] = ()
        self._has_woken = False

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

    def let_rest(self, cfg: CurriculumConfig) -> None:
        """From now on skip rows that rest by `cfg`, whose `pass_rate` is set."""
        self._rates = tuple(
            PassRates(
                source.num_rows,
                cfg,
                {
                    number: rate
                    for row_id, rate in self._known_rates.items()
                    if (number := source.number_of(row_id)) is not None
                },
            )
            for source in self.sources
        )

    @property
    def learns(self) -> bool:
        """Whether rows rest, so that `learn` is to be called."""
        return bool(self._rates)

    def learn(self, row_id: str, rate: float) -> None:
        """Note the pass rate of a group of a row that was drawn. Raises KeyError where no row has
        the id."""
        for source, rates in zip(self.sources, self._rates, strict=True):
            if (number := source.number_of(row_id)) is not None:
                rates.scored(number, rate)
                return
        raise KeyError(row_id)

    @property
    def counts(self) -> dict[str, float]:
        """How many rows were read so far from sources that are read as rows are drawn, and skipped
        by reason. With `let_rest` also how many rest in the current epochs of their sources, and
        the mean of the last rates of all that have one. Else empty."""
        counts: dict[str, float] = {}
        if any(source.is_streamed for source in self.sources):
            counts["rows_read"] = sum(
                n for n, source in zip(self._read, self.sources, strict=True) if source.is_streamed
            )
        counts |= {f"skipped_{reason}": number for reason, number in self._skipped.items()}
        if self._rates:
            epochs = (
                n // source.num_rows for n, source in zip(self._read, self.sources, strict=True)
            )
            counts["skipped_resting"] = self._skipped["resting"]
            counts["resting"] = sum(
                rates.num_resting(epoch) for rates, epoch in zip(self._rates, epochs, strict=True)
            )
            if (known := np.concatenate([rates.rates for rates in self._rates])).size:
                counts["pass_rate"] = float(known.mean(dtype=np.float64))
        return counts

    def take(self, num: int) -> list[T]:
        """The next `num` rows. Raises UserError where a source has no row that is served, and for a
        row that is read and is wrong."""
        if not self.sources or not all(source.num_rows for source in self.sources):
            raise UserError("there are no rows to train on; name a data set in `data.train`")
        return [self._draw() for _ in range(num)]

    def peek(self, num: int) -> list[T]:
        """The rows that `take` gives next."""
        before = list(self._read), list(self._served), Counter(self._skipped)
        with ExitStack() as stack:
            for rates in self._rates:
                stack.enter_context(rates.unchanged())
            rows = self.take(num)
        self._read, self._served, self._skipped = before
        return rows

    def state_dict(self) -> dict[str, Any]:
        """The position, with the fingerprint of the data, as small JSON values. `let_rest` adds the
        tables of pass rates, 16 characters for each row that was drawn."""
        position = {"read": list(self._read), "served": list(self._served)}
        state = {**self._identity, **position, "skipped": dict(self._skipped)}
        if self._rates:
            state["pass_rates"] = [rates.state_dict() for rates in self._rates]
        return state

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
        # Absent where the run has had no `data.curriculum.pass_rate` so far.
        for rates, table in zip(self._rates, state.get("pass_rates", ()), strict=False):
            rates.load_state_dict(table)

    def _draw(self) -> T:
        number = self._mixture.next_source(self._served)
        source = self.sources[number]
        while True:
            num_resting = self._skipped["resting"]
            # Of two epochs, the first may serve its rows early and the second late.
            for _ in range(2 * source.num_rows):
                row = self._next_row(number)
                if not isinstance(row, Skipped):
                    self._served[number] += 1
                    return row
                self._skip(row)
            if self._skipped["resting"] == num_resting:
                raise nothing_left(source)
            self._wake(number)

    def _next_row(self, number: int) -> T | Skipped:
        """Read a row of a source."""
        source = self.sources[number]
        epoch = self._read[number] // source.num_rows
        row = source.row(self._read[number])
        self._read[number] += 1
        if not self._rates or isinstance(row, Skipped):
            return row
        rates, own = self._rates[number], source.number_of(row.id)
        assert own is not None, row.id
        if rates.rests(own, epoch):
            return Skipped("resting", row.id)
        rates.drawn(own, epoch)
        return row

    def _wake(self, number: int) -> None:
        """Let all rows of a source be drawn again."""
        source = self.sources[number]
        self._rates[number].wake(self._read[number] // source.num_rows)
        if not self._has_woken:
            self._has_woken = True
            logger.warning(
                "%s: all prompts rest, by data.curriculum, so they are drawn all the same (this is "
                "said once)",
                source.name,
            )

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
