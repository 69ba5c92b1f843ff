"""Ids of rows: `<name of the source>:<row>`, with `:<name of the item>` where a row is several.

Ids count rows from 1, as messages do. Numbers, by which rows are found in a source, count from 0.
"""

from __future__ import annotations

__all__ = ["number_of", "row_id"]


def row_id(name: str, number: int, item: str = "") -> str:
    """The id of the row with this number, from 0, in the source `name`, or of an item of the
    row."""
    return f"{name}:{number + 1}:{item}" if item else f"{name}:{number + 1}"


def number_of(own_id: str, name: str, num_rows: int) -> int | None:
    """The number, from 0, of the row with an id; None where it is not that of one of the `num_rows`
    rows of the source `name`, or that of an item."""
    found, _, number = own_id.rpartition(":")
    is_own = found == name and number.isdecimal() and 0 < int(number) <= num_rows
    return int(number) - 1 if is_own else None
