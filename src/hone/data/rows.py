"""Rows as they are read, before any column of them is used, and how text becomes one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from hone.errors import UserError

__all__ = ["BYTE_ORDER_MARK", "OnBad", "SourceRow", "decode", "json_row", "parse_json", "shorten"]

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"

OnBad: TypeAlias = Callable[[UserError], None] | None
"""Is told of what cannot be read, a row or the rest of a file, and reading goes on after it. None:
it is raised."""


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row of a source, as it was read."""

    columns: dict[str, Any]
    location: str
    """File and line, for messages: `data/train.jsonl, line 17`."""
    folder: Path | None = None
    """The folder of the file, to which paths in the row are relative; None for a data set that is
    no file of this host."""
    is_padded: bool = False
    """Whether objects have nulls for fields that only other rows have, as in Arrow. In JSON a null
    was written on purpose."""


def shorten(text: str, num_chars: int = 80) -> str:
    """The beginning of a text, on one line, for messages."""
    text = " ".join(text.split())
    return text if len(text) <= num_chars else text[: num_chars - 3] + "..."


def decode(data: bytes, location: str) -> str:
    """UTF-8 text. Raises UserError for other bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if data.startswith(_GZIP):
            raise UserError(
                f"{location}: the file is compressed; name it .jsonl.gz or .json.gz, or unpack it "
                "(gunzip)"
            ) from error
        shown = shorten(data.decode(errors="replace"))
        raise UserError(
            f"{location}: not UTF-8 text ({error.reason}): {shown}. Save the file as UTF-8, for "
            "example with iconv -f ENCODING -t UTF-8"
        ) from error


def parse_json(text: str, location: str) -> Any:
    """The value of a JSON text. Raises UserError, with the place, where it is none."""
    try:
        return json.loads(text.rstrip())  # an end of line would be where a row ends too early
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, " if error.lineno > 1 else ""
        begin = max(0, error.pos - 40)
        hint = ""
        if text.strip() == "[":
            hint = " A file that is one JSON list of rows ends in .json: rename it."
        raise UserError(
            f"{location}: not valid JSON ({error.msg} at {place}column {error.colno}), "
            f"near: {shorten(text[begin:])}{hint}"
        ) from error
    except (ValueError, RecursionError) as error:  # thousands of digits, or deep nesting
        problem = shorten(str(error).partition(";")[0])
        raise UserError(f"{location}: JSON that Python cannot read: {problem}") from error


def json_row(value: Any, location: str, folder: Path | None) -> SourceRow:
    """A row from a value of JSON. Raises UserError where that is no object."""
    if not isinstance(value, dict):
        raise UserError(
            f"{location}: a row must be a JSON object with named columns, "
            f"got {type(value).__name__}: {shorten(json.dumps(value))}"
        )
    return SourceRow(value, location, folder)
