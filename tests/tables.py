"""A table as one test: every row is checked, and all that are wrong are reported together.

A test per row would be collected, scheduled and reported a thousand times for checks of a
millisecond; a plain loop would stop at the first wrong row.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_TESTS = str(Path(__file__).parent)
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
    empty table proves nothing. Where every row skips the table does; a row that skips beside others
    is wrong, since nobody would see that it was not checked.
    """
    named = list(rows.items()) if isinstance(rows, Mapping) else [(_name(row), row) for row in rows]
    errors: list[str] = []
    skipped: list[pytest.skip.Exception] = []
    for name, row in named:
        before = _Rows.checked
        try:
            check(*row) if isinstance(row, tuple) else check(row)
        except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:  # noqa: BLE001
            errors.append(f"{name}\n{_described(error)}")
            if isinstance(error, pytest.skip.Exception):
                skipped.append(error)
        _Rows.checked = max(_Rows.checked, before + 1)  # a row that is a table counts its own
    if skipped and len(skipped) == len(named):
        raise skipped[0]
    if len(named) < minimum:
        errors.append(f"The table has {len(named)} rows, fewer than {minimum}.")
    if errors:
        more = len(errors) - MOST_SHOWN
        shown = [*errors[:MOST_SHOWN], *([f"and {more} more"] if more > 0 else [])]
        pytest.fail(
            f"{len(errors)} of {len(named)} rows are wrong:\n\n" + "\n".join(shown), pytrace=False
        )


def table(names: str, rows: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make one test that checks all rows, from a function that checks the row of its arguments.

    It is written like `pytest.mark.parametrize`, which makes a test of each row. Each row has a
    `tmp_path` and a `monkeypatch` of its own, and of what is printed or logged it sees only its
    own; any other fixture is shared by the rows, which must leave it as it was. Two tables above
    one function check every pair of their rows.
    """
    columns = [name.strip() for name in names.split(",")]
    held = [_row(row, len(columns)) for row in rows]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(test).parameters
        assert set(columns) <= set(parameters), f"{test.__name__} does not take all of {names}"

        @functools.wraps(test)
        def checked(**fixtures: Any) -> None:
            def check(*values: Any) -> None:
                with _own(fixtures) as own:
                    test(**dict(zip(columns, values, strict=True)), **own)

            check_rows(held, check)

        rest = [one for name, one in parameters.items() if name not in columns]
        checked.__signature__ = inspect.Signature(rest)  # pyright: ignore[reportAttributeAccessIssue]
        return checked

    return decorate


def _row(row: Any, num_columns: int) -> tuple[Any, ...]:
    values: Sequence[Any] = (row,) if num_columns == 1 else row
    assert len(values) == num_columns, f"{row!r} does not have {num_columns} values"
    return tuple(values)


@contextmanager
def _own(fixtures: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The fixtures as one row gets them."""
    own = dict(fixtures)
    if "tmp_path" in own:
        folder: Path = own["tmp_path"]
        own["tmp_path"] = folder / f"row{sum(1 for _ in folder.glob('row*'))}"
        own["tmp_path"].mkdir()
    for name in {"capsys", "capfd"} & set(own):
        own[name].readouterr()
    if "caplog" in own:
        own["caplog"].clear()
    with pytest.MonkeyPatch.context() as patch:
        if "monkeypatch" in own:
            own["monkeypatch"] = patch
        yield own


def _name(row: Any) -> str:
    parts = row if isinstance(row, tuple) else (row,)
    text = " | ".join(str(getattr(part, "__name__", part)) for part in parts)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _described(error: BaseException) -> str:
    """The error and the line of the tests that led to it, indented."""
    places = traceback.extract_tb(error.__traceback__)
    place = [place for place in places if place.filename.startswith(_TESTS)][-1]
    text = f"{type(error).__name__}: {error}\nat {place.filename}:{place.lineno}: {place.line}"
    return "".join(f"    {line}\n" for line in text.splitlines())
