"""An endless, ordered stream of rows that can be stopped and resumed anywhere.

The position is two counters for each source: rows read, and rows served. They differ where a source
is read while it is drawn from, and rows are skipped on the way (`hone.data.streamed`), and where
rows rest, for which a table of their pass rates is added (`hone.data.curriculum`). With limits on
sources it also has the rows served when the present phase began (`hone.data.phases`).
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
from hone.data.filters import REASONS
from hone.data.phases import Limits, Phase, Phases
from hone.data.row_source import Item, RowSource, Skipped, WholeRows, nothing_left
from hone.data.settings import CurriculumConfig
from hone.errors import UserError

__all__ = ["Stream"]

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Item)


def _in_state(limits: Sequence[Limits]) -> list[list[int | None]]:
    """Limits as values of JSON."""
    return [[own.from_step, own.until_step, own.max_epochs] for own in limits]


def _content(item: Item) -> object:
    return item.id, item.token_ids


class Stream(Generic[T]):
    """Rows of one or several sources, epoch after epoch, without end.

    A source is a `RowSource`, or a sequence of all its rows. `weights` are the relative shares of
    the sources (default: equal), `limits` say when each gives rows (default: always), and `names`
    are those for messages and metrics (default: their numbers). `seed`, `shuffle` and `content` are
    those of `WholeRows`, for sources that are sequences. `column_values` are the difficulties and
    the pass rates from before the run that columns give for rows, by role and row id.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[T] | RowSource[T]],
        *,
        seed: int,
        weights: Sequence[float] | None = None,
        limits: Sequence[Limits] | None = None,
        names: Sequence[str] | None = None,
        shuffle: bool = True,
        content: Callable[[T], object] = _content,
        column_values: Mapping[Role, Mapping[str, float]] | None = None,
    ) -> None:
        weights = [1.0] * len(sources) if weights is None else weights
        assert len(weights) == len(sources), f"{len(weights)=} {len(sources)=}"
        values = column_values or {}
        self.sources = tuple(
            source
            if isinstance(source, RowSource)
            else WholeRows(
                source,
                seed=seed,
                shuffle=shuffle,
                content=content,
                difficulties=values.get("difficulty"),
            )
            for source in sources
        )
        self.seed = seed
        self.shuffle = shuffle
        self.names = tuple(names or map(str, range(len(self.sources))))
        assert len(self.names) == len(self.sources), f"{self.names=} {len(self.sources)=}"
        self._phases = Phases(weights, limits or [Limits()] * len(self.sources))
        self._phase = self._phases.first
        self._read = [0] * len(self.sources)
        self._served = [0] * len(self.sources)
        self._told = [0] * len(self.sources)
        """Rows that each source had served when `drawn` was last called."""
        self._skipped: Counter[str] = Counter()
        self._known_rates = values.get("pass_rate", {})
        self._rates: tuple[PassRates, ...] = ()
        self._said = set[str]()
        """Kinds of warnings that are logged once."""

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
        """Note the pass rate of a group of a row that was drawn: the mean of its rewards, in their
        unit. Raises KeyError where no row has the id."""
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

    def drawn(self) -> dict[str, int]:
        """How many rows each source has served since the last call of this, by name; empty where
        there is one source."""
        if len(self.sources) < 2:
            return {}
        before, self._told = self._told, list(self._served)
        numbers = zip(self._told, before, strict=True)
        return {name: n - b for name, (n, b) in zip(self.names, numbers, strict=True)}

    def take(self, num: int, *, step: int = 1) -> list[T]:
        """The next `num` rows, for a step of the run, which limits of sources refer to. Raises
        UserError where a source has no row that is served, and for a row that is read and is
        wrong."""
        self._require_rows()
        rows: list[T] = []
        for _ in range(num):
            before = self._phase
            rows.append(self._draw(step))
            if before.sources not in ((), self._phase.sources):
                self._say_what_changes(before)
        return rows

    def peek(self, num: int, *, step: int = 1) -> list[T]:
        """The rows that `take` gives next."""
        self._require_rows()
        before = list(self._read), list(self._served), Counter(self._skipped), self._phase
        with ExitStack() as stack:
            for rates in self._rates:
                stack.enter_context(rates.unchanged())
            rows = [self._draw(step) for _ in range(num)]
        self._read, self._served, self._skipped, self._phase = before
        return rows

    def state_dict(self) -> dict[str, Any]:
        """The position, with the fingerprint of the data, as small JSON values. `let_rest` adds the
        tables of pass rates, 16 characters for each row that was drawn."""
        position = {
            "read": list(self._read),
            "served": list(self._served),
            "told": list(self._told),
            "phase": self._phase.state_dict(),
        }
        known = {"digests": list(self._fingerprints[1]), "skipped": dict(self._skipped)}
        state = {**self._identity, **position, **known}
        if self._rates:
            state["pass_rates"] = [rates.state_dict() for rates in self._rates]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raises UserError if it belongs to other data."""
        state = {"limits": _in_state([Limits()] * len(self.sources)), **state}
        for key, value in self._identity.items():
            if state[key] != value:
                raise UserError(
                    f"the saved data position belongs to other data: {key} was {state[key]!r} "
                    f"and is now {value!r}{self._other_sources(state)}. Restore the data settings "
                    "of that run, or start anew in another `run.dir`."
                )
        # Checkpoints from before sources could be streamed have one counter a source.
        self._read = [int(number) for number in state.get("read", state.get("drawn", ()))]
        self._served = [int(number) for number in state.get("served", self._read)]
        self._told = [int(number) for number in state.get("told", self._served)]
        # Those from before sources could have limits have one phase.
        phase = state.get("phase")
        self._phase = self._phases.unlimited if phase is None else Phase.from_state(phase)
        self._skipped = Counter(state.get("skipped", {}))
        # Absent where the run has had no `data.curriculum.pass_rate` so far.
        for rates, table in zip(self._rates, state.get("pass_rates", ()), strict=False):
            rates.load_state_dict(table)

    def _other_sources(self, state: Mapping[str, Any]) -> str:
        """The sources whose rows are not those of a saved position, for messages; empty where that
        does not say."""
        before, (_, digests) = state.get("digests", ()), self._fingerprints
        if len(before) != len(digests):
            return ""
        pairs = zip(self.names, before, digests, strict=True)
        changed = [name for name, old, new in pairs if old != new]
        if not changed:
            return ""
        return f". Of {', '.join(changed)} the files or the keys that choose rows have changed"

    def _require_rows(self) -> None:
        if not self.sources or not all(source.num_rows for source in self.sources):
            raise UserError("there are no rows to train on; name a data set in `data.train`")

    def _draw(self, step: int) -> T:
        ended = [
            limits.include(step) and self._has_ended(number)
            for number, limits in enumerate(self._phases.limits)
        ]
        self._phase = self._phases.following(self._phase, step, self._served, ended)
        number = self._phases.next_source(self._phase, self._served)
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
        """Read the next row of a source, and note that it is drawn."""
        row = self._row_at_place(number)
        epoch = self._read[number] // self.sources[number].num_rows
        self._read[number] += 1
        if self._rates and not isinstance(row, Skipped):
            own = self.sources[number].number_of(row.id)
            assert own is not None, row.id
            self._rates[number].drawn(own, epoch)
        return row

    def _row_at_place(self, number: int) -> T | Skipped:
        """The row that a source gives next, which may rest."""
        source = self.sources[number]
        row = source.row(self._read[number])
        if not self._rates or isinstance(row, Skipped):
            return row
        own = source.number_of(row.id)
        assert own is not None, row.id
        rests = self._rates[number].rests(own, self._read[number] // source.num_rows)
        return Skipped("resting", row.id) if rests else row

    def _wake(self, number: int) -> None:
        """Let all rows of a source be drawn again."""
        source = self.sources[number]
        self._rates[number].wake(self._read[number] // source.num_rows)
        self._say_once(
            "woken",
            "%s: all prompts rest, by data.curriculum, so they are drawn all the same (this is "
            "said once)",
            self.names[number],
        )

    def _say_once(self, what: str, message: str, *values: object) -> None:
        """Log a warning, unless one of the same kind was logged."""
        if what not in self._said:
            self._said.add(what)
            logger.warning(message, *values)

    def _has_ended(self, number: int) -> bool:
        """Whether a source has served all rows of its last epoch. What is skipped or rests is
        passed, so that this is known before the turn of the source, as if it were read whole."""
        source, max_epochs = self.sources[number], self._phases.limits[number].max_epochs
        if max_epochs is None:
            return False
        while self._read[number] < max_epochs * source.num_rows:
            row = self._row_at_place(number)
            if not isinstance(row, Skipped):
                return False
            self._read[number] += 1
            self._skip(row)
        if not self._served[number]:
            # Rows that were never drawn rest only by rates from before the run.
            if not (self._rates and self._rates[number].rates.size):
                raise nothing_left(source)
            self._say_once(
                "all rest",
                "%s: all its prompts rest, by columns.pass_rate, until it ends (max_epochs %d), so "
                "it gives no row",
                self.names[number],
                max_epochs,
            )
        return True

    def _say_what_changes(self, before: Phase) -> None:
        """Log which sources end and begin, and the shares from here on."""
        now, changes = self._phase, list[str]()
        for number in sorted({*before.sources} - {*now.sources}):
            limits = self._phases.limits[number]
            is_over = not limits.include(now.step)
            why = (
                f"until_step {limits.until_step}" if is_over else f"max_epochs {limits.max_epochs}"
            )
            changes.append(f"{self.names[number]} ends ({why})")
        changes += [
            f"{self.names[number]} begins" for number in sorted({*now.sources} - {*before.sources})
        ]
        shares = (
            f"{self.names[number]} {share:.1%}"
            for number, share in self._phases.shares_of(now).items()
        )
        logger.info("step %d: %s; shares: %s", now.step, ", ".join(changes), ", ".join(shares))

    def _skip(self, row: Skipped) -> None:
        """Count a row, and log the first of each reason."""
        self._skipped[row.reason] += 1
        if self._skipped[row.reason] == 1 and row.reason in REASONS:
            # A look ahead counts rows that are counted again when they are drawn.
            self._say_once(
                row.reason,
                "a row was skipped, since %s: %s; further ones are counted in data/skipped_%s",
                REASONS[row.reason].of_one,
                row.where,
                row.reason,
            )

    @cached_property
    def _fingerprints(self) -> tuple[str, tuple[str, ...]]:
        """Digests of the values by which sources are recognised: of all sources, and of each."""
        of_all, digests = blake2b(digest_size=16), list[str]()
        for source in self.sources:
            of_source = blake2b(digest_size=8)
            for value in source.identity:
                text = repr(value).encode()
                of_all.update(text)
                of_source.update(text)
            digests.append(of_source.hexdigest())
        return of_all.hexdigest(), tuple(digests)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "shares": [str(share) for share in self._phases.shares],
            "limits": _in_state(self._phases.limits),
            "num_rows": [source.num_rows for source in self.sources],
            "fingerprint": self._fingerprints[0],
        }
