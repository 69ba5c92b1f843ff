"""Which prompts are drawn first, and which ones rest: difficulties from a column, and pass rates
that the run measures, or that a column has for the time before.

A run reports the rate of each group that it has scored. A prompt whose last rate lies outside of
the band rests: its row is read and skipped in some epochs of its source that follow the one in
which it was last drawn. How many is drawn by a hash, since rows that began to rest together would
come back together, and whole steps would have nothing to learn from. So rest is a function of the
table, the epoch and the settings, and the table has two numbers a row.
"""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from hone.data.columns import required
from hone.data.row_ids import row_id
from hone.data.rows import SourceRow, shorten
from hone.data.settings import CurriculumConfig, SourceBase
from hone.errors import UserError

__all__ = ["ROLES", "PassRates", "Role", "column_numbers"]

Role = Literal["difficulty", "pass_rate"]
ROLES: tuple[Role, ...] = get_args(Role)
_NOUNS: Mapping[Role, str] = {"difficulty": "difficulty", "pass_rate": "pass rate"}
_ROW, _EPOCH, _RATE = np.dtype("<u4"), np.dtype("<u4"), np.dtype("<f4")
"""Types of the saved arrays: 12 bytes a row."""
_MASK = 2**64 - 1


def column_numbers(
    rows: Sequence[SourceRow], numbers: Sequence[int], source: SourceBase, name: str, role: Role
) -> dict[str, float]:
    """What the column of a role says of the rows with these numbers, counted from 0, by their ids
    (`hone.data.row_ids`); empty where `columns` names none. Raises UserError for a
    value that is not a finite number."""
    column: str | None = getattr(source.columns, role)
    if column is None:
        return {}
    numbered = zip(numbers, rows, strict=True)
    return {row_id(name, number): _number(row, column, role) for number, row in numbered}


def _number(row: SourceRow, column: str, role: Role) -> float:
    value = required(row, column, _NOUNS[role])
    is_number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise UserError(
            f"{row.location}: column {column!r}, which gives the {_NOUNS[role]}, holds "
            f"{shorten(repr(value))}; put a finite number there, or leave columns.{role} unset"
        )
    return float(value)


class PassRates:
    """The rates of the rows of one source, and which of them rest. Rows have numbers from 0.
    `known` are rates from before the run, by number: such rows rest as if they had been drawn in an
    epoch before the first one."""

    def __init__(
        self, num_rows: int, cfg: CurriculumConfig, known: Mapping[int, float] | None = None
    ) -> None:
        assert cfg.pass_rate is not None
        # In the precision of the table, so that a rate that equals a bound is not inside.
        self._low, self._high = (np.float32(bound) for bound in cfg.pass_rate)
        self._rest_epochs = cfg.rest_epochs
        self._rates: NDArray[np.float32] = np.full(num_rows, np.nan, dtype=_RATE)
        """[n], of the last group that was scored, before that as `known`; NaN where unknown."""
        self._drawn: NDArray[np.uint32] = np.zeros(num_rows, dtype=_EPOCH)
        """[n], 1 + the epoch in which the row was last drawn; 0 before."""
        self._awake_from = -1
        """What was last drawn in an earlier epoch does not rest."""
        self._undo: list[tuple[int, int]] | None = None
        for number, rate in (known or {}).items():
            self._rates[number] = rate

    def rests(self, number: int, epoch: int) -> bool:
        """Whether a row is skipped in an epoch."""
        rate, drawn = self._rates[number], int(self._drawn[number])
        if not (rate <= self._low or rate >= self._high) or drawn <= self._awake_from:
            return False
        return 0 < epoch + 1 - drawn <= self._num_epochs(number, drawn)

    def drawn(self, number: int, epoch: int) -> None:
        """Note that a row is drawn."""
        if self._undo is not None:
            self._undo.append((number, int(self._drawn[number])))
        self._drawn[number] = epoch + 1

    def scored(self, number: int, rate: float) -> None:
        """Note the rate of a group of the row."""
        self._rates[number] = rate

    def wake(self, epoch: int) -> None:
        """End the rest of all rows that were last drawn before `epoch`."""
        self._awake_from = epoch

    @contextmanager
    def unchanged(self) -> Generator[None]:
        """Undo at the end what was drawn and woken in the block."""
        self._undo, awake_from = [], self._awake_from
        try:
            yield
        finally:
            for number, drawn in reversed(self._undo):
                self._drawn[number] = drawn
            self._undo, self._awake_from = None, awake_from

    def num_resting(self, epoch: int) -> int:
        """How many rows are skipped in an epoch."""
        is_outside = (self._rates <= self._low) | (self._rates >= self._high)
        numbers = np.flatnonzero(is_outside & (self._drawn.astype(np.int64) > self._awake_from))
        drawn = self._drawn[numbers].astype(np.uint64)
        since = epoch + 1 - drawn.astype(np.int64)
        most = self._num_epochs(numbers.astype(np.uint64), drawn).astype(np.int64)
        return int(((since > 0) & (since <= most)).sum())

    def _num_epochs(self, number: Any, drawn: Any) -> Any:
        """For how many epochs a row rests since it was last drawn: 1 to 2 `rest_epochs` - 1, which
        is `rest_epochs` in the mean. Of one row or of arrays [n] of 64 unsigned bits."""
        # The finalizer of splitmix64 (Steele, Lea, Flood, OOPSLA 2014), over the two numbers.
        mixed = (number * 0x9E3779B97F4A7C15 + drawn * 0xD1B54A32D192ED03) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return (mixed ^ (mixed >> 31)) % (2 * self._rest_epochs - 1) + 1

    @property
    def rates(self) -> NDArray[np.float32]:
        """The last rates of all rows that have one."""
        return self._rates[~np.isnan(self._rates)]

    def state_dict(self) -> dict[str, Any]:
        """The table as JSON values, 16 characters for each row that was drawn or has a rate."""
        rows = np.flatnonzero((self._drawn > 0) | ~np.isnan(self._rates))
        return {
            "rows": _text(rows.astype(_ROW)),
            "drawn": _text(self._drawn[rows]),
            "rates": _text(self._rates[rows]),
            "awake_from": self._awake_from,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; the settings may have changed."""
        rows = _array(state["rows"], _ROW)
        self._drawn[rows] = _array(state["drawn"], _EPOCH)
        self._rates[rows] = _array(state["rates"], _RATE)
        self._awake_from = int(state["awake_from"])


def _text(values: NDArray[Any]) -> str:
    return b64encode(values.tobytes()).decode()


def _array(text: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.frombuffer(b64decode(text), dtype=dtype)
