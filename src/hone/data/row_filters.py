"""Filters of rows before they are rendered, in this order: the user's function, rows without an
answer, duplicates.

    rows ─► `Sieve.left_out` ─► `Sieve.digests` ─► earlier in the epoch? ─► examples
                └─► Skipped                              └─► Skipped

A further filter is a reason in `hone.data.filters.REASONS` and a line in `Sieve.left_out`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hone.data.duplicates import Digests, Hashes, digest
from hone.data.filters import FilterReport
from hone.data.row_source import Skipped
from hone.data.rows import SourceRow
from hone.data.settings import DataConfig, template_fields
from hone.errors import UserError

__all__ = [
    "InFileOrder",
    "Keep",
    "ReadColumns",
    "Sieve",
    "first_wanted",
    "load_filter",
    "passing",
    "split",
    "wanted",
]

Keep: TypeAlias = Callable[[SourceRow], bool]
"""Whether the user's function wants a row. Raises UserError."""
_OF_TEMPLATES = ("tools", "chat_template_kwargs")
"""Columns besides the roles that a chat template gets."""


class ReadColumns(Protocol):
    """What a reader knows of the columns of its source."""

    @property
    def content_columns(self) -> Sequence[str]:
        """Columns of which the content of a row consists, besides that of the images."""
        ...

    @property
    def images_column(self) -> str | None:
        """The column of the images, if there is one."""
        ...

    def missing(self, row: SourceRow, /) -> str | None:
        """Why a row has no answer, with its place; None where it has one, or none is read."""
        ...


def load_filter(spec: str | None) -> Keep | None:
    """The function of `data.filter`, imported; None where it is unset. Raises UserError where it
    cannot be."""
    if spec is None:
        return None
    from hone.user_code.resolve import error_location, resolve  # which few runs need

    try:
        function = resolve(spec, "filter function")
    except ValueError as error:
        raise UserError(f"data.filter: {error}") from error

    def keep(row: SourceRow) -> bool:
        given: Mapping[str, Any] = dict(row.columns)
        try:
            wanted = function(given)
        except (Exception, SystemExit) as error:  # foreign code may raise anything
            raise UserError(
                f"{row.location}: data.filter '{spec}' failed for this row: "
                f"{error_location(error)}. Let it return False for rows that it cannot judge"
            ) from error
        if not isinstance(wanted, bool):
            raise UserError(
                f"{row.location}: data.filter '{spec}' must return True or False, and returned "
                f"{type(wanted).__name__} for this row; write bool(...) around it"
            )
        return wanted

    return keep


def passing(keep: Keep | None, rows: Sequence[SourceRow]) -> list[Skipped | None]:
    """Of each row what skips it by the user's function, or None. Raises UserError."""
    if keep is None:
        return [None] * len(rows)
    return [None if keep(row) else Skipped("filter", row.location) for row in rows]


def wanted(keep: Keep | None, rows: Sequence[SourceRow]) -> list[SourceRow]:
    """The rows that the user's function wants; all where there is none. Raises UserError."""
    return [row for row in rows if keep is None or keep(row)]


def first_wanted(
    keep: Keep | None, blocks: Iterable[Sequence[SourceRow]], report: FilterReport
) -> list[SourceRow]:
    """The rows that the user's function wants, of the first block that has any; empty where none
    has. By them columns are chosen. The rows that it does not want, of all blocks that are read for
    this, are added to the report. Raises UserError."""
    for rows in blocks:
        found, _ = split(rows, range(len(rows)), passing(keep, rows), report)
        if found:
            return found
    return []


class Sieve:
    """Which rows of a source are left out before they are rendered."""

    def __init__(self, cfg: DataConfig, reader: ReadColumns, keep: Keep | None) -> None:
        self._keep = keep
        self._missing = reader.missing if cfg.missing_answers == "drop" else None
        self.drops_duplicates = cfg.duplicates == "drop"
        """Whether rows are left out whose content an earlier row has."""
        # `{prompt}` of a template is the role.
        further = {*template_fields(cfg.prompt_template), *_OF_TEMPLATES} - {"prompt"}
        self._columns = [*reader.content_columns, *sorted(further)]
        self._images = reader.images_column

    def left_out(self, rows: Sequence[SourceRow]) -> list[Skipped | None]:
        """Of each row what skips it whatever other rows there are, or None. Raises UserError."""
        found = passing(self._keep, rows)
        if self._missing is not None:
            for number, row in enumerate(rows):
                if found[number] is None and (why := self._missing(row)) is not None:
                    found[number] = Skipped("missing_answer", why)
        return found

    def digests(self, rows: Sequence[SourceRow]) -> Hashes:
        """Digests of the contents of rows, [n]; 0 of those that are left out whatever other rows
        there are. Raises UserError."""
        return self._digests(rows, self.left_out(rows))

    def _digests(self, rows: Sequence[SourceRow], left_out: Sequence[Skipped | None]) -> Hashes:
        found = (
            digest(row, self._columns, self._images) if why is None else 0
            for row, why in zip(rows, left_out, strict=True)
        )
        return np.fromiter(found, dtype=np.uint64, count=len(rows))

    def with_repeats(
        self, rows: Sequence[SourceRow], repeats: Callable[[Hashes], NDArray[np.bool_]]
    ) -> list[Skipped | None]:
        """Of each row what skips it, or None: `left_out`, and with `data.duplicates` drop also the
        rows of which `repeats` says, by their digests [n], that an earlier row has the same content
        [n]. Raises UserError."""
        found = self.left_out(rows)
        if self.drops_duplicates:
            for number in np.flatnonzero(repeats(self._digests(rows, found))).tolist():
                found[number] = Skipped("duplicate", rows[number].location)
        return found


class InFileOrder:
    """Leaves rows of a source out as they come, in the order of its files."""

    def __init__(self, sieve: Sieve) -> None:
        self._sieve, self._digests = sieve, Digests()

    def __call__(self, rows: Sequence[SourceRow]) -> list[Skipped | None]:
        """Of each row what skips it, or None; these rows follow those of the calls before. Raises
        UserError."""
        return self._sieve.with_repeats(rows, self._digests.add)

    def learn(self, rows: Sequence[SourceRow]) -> None:
        """Know the contents of rows that come before the place at which reading begins. Only needed
        where the sieve `drops_duplicates`. Raises UserError."""
        self._digests.add(self._sieve.digests(rows))

    def kept(
        self, rows: Sequence[SourceRow], numbers: Sequence[int], report: FilterReport
    ) -> tuple[list[SourceRow], list[int]]:
        """The rows that are not left out, with their numbers; others are added to the report.
        Raises UserError."""
        return split(rows, numbers, self(rows), report)


def split(
    rows: Sequence[SourceRow],
    numbers: Sequence[int],
    skipped: Sequence[Skipped | None],
    report: FilterReport,
) -> tuple[list[SourceRow], list[int]]:
    """Rows that nothing skips, with their numbers; others are added to the report."""
    for why in skipped:
        if why is not None:
            report.skip(why)
    kept = [place for place, why in enumerate(skipped) if why is None]
    return [rows[place] for place in kept], [numbers[place] for place in kept]
