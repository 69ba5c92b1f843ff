"""A table as one test: every row is checked, and all that are wrong are reported together.

A test per row would be collected, scheduled and reported a thousand times for checks of a
millisecond; a plain loop would stop at the first wrong row.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

MOST_SHOWN = 20
"""Wrong rows that a report shows in full; it counts the others."""


class _Rows:
    checked = 0


def rows_checked() -> int:
    """Rows that this process has checked so far."""
    return _Rows.checked


def check_rows(
    rows: Mapping[str, Any] | Iterable[Any],
    check: Callable[..., object],
    *,
    minimum: int = 1,
) -> None:
    """Call `check` with each row and fail with the errors of all rows that raise.

    A row that is a tuple is passed as separate arguments, any other as one. A mapping names its
    rows; other rows are named by what they hold. Fewer rows than `minimum` are a failure too: an
    empty table proves nothing.
    """
    named = rows.items() if isinstance(rows, Mapping) else [(_name(row), row) for row in rows]
    _Rows.checked += len(named)
    errors: list[str] = []
    for name, row in named:
        try:
            check(*row) if isinstance(row, tuple) else check(row)
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001  the row is wrong
            errors.append(f"{name}\n{_described(error)}")
    if len(named) < minimum:
        errors.append(f"The table has {len(named)} rows, fewer than {minimum}.")
    if errors:
        more = len(errors) - MOST_SHOWN
        shown = [*errors[:MOST_SHOWN], *([f"and {more} more"] if more > 0 else [])]
        pytest.fail(
            f"{len(errors)} of {len(named)} rows are wrong:\n\n" + "\n".join(shown), pytrace=False
        )


def _name(row: Any) -> str:
    parts = row if isinstance(row, tuple) else (row,)
    text = " | ".join(str(getattr(part, "__name__", part)) for part in parts)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _described(error: BaseException) -> str:
    """The error and the line of the test in which it was raised, indented."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{type(error).__name__}: {error}\nat {place.filename}:{place.lineno}: {place.line}"
    return "".join(f"    {line}\n" for line in text.splitlines())
