"""Rows that a program gives as they are, and how they come into a run: as a JSONL file.

A run then finds them again when it goes on, whatever has become of the program. Other rows get
another folder, so that those of earlier runs stay, and settings that name it are seen to differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from hone.data.sources import shorten
from hone.errors import UserError
from hone.observe.whole_file import write_whole

__all__ = ["GivenRows", "given_rows", "is_source"]

_KINDS = (
    "a list of dicts, a pandas DataFrame, a `datasets.Dataset`, or the path or hub name of a data "
    "set"
)


def is_source(data: Any) -> bool:
    """Whether this names a data set, and is none."""
    return isinstance(data, str | Path)


def given_rows(data: Any, name: str) -> list[dict[str, Any]]:
    """Rows of a list of dicts or texts, a pandas DataFrame or a `datasets.Dataset`, ready for JSON.

    Raises UserError, which calls the argument `name`, for what is no such thing.
    """
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        names = [*map(str, data.columns)]
        if twice := sorted({column for column in names if names.count(column) > 1}):
            raise UserError(f"{name} has several columns named {', '.join(twice)}; rename them")
        data = data.to_dict("records")
    if isinstance(data, Mapping):
        raise UserError(
            f"{name} is a dict with the keys {', '.join(map(str, data))}; give one split of it, or "
            "rows: [{'prompt': ..., 'answer': ...}, ...]"
        )
    if not isinstance(data, Iterable) or isinstance(data, bytes):
        raise UserError(f"{name} is of type {type(data).__name__}; give {_KINDS}")
    rows = [_row(row, f"{name}, row {number}") for number, row in enumerate(data, start=1)]
    if not rows:
        raise UserError(f"{name} holds no rows")
    return rows


@dataclass(frozen=True, slots=True)
class GivenRows:
    """Rows of a split, as JSON lines."""

    split: str
    text: str

    @classmethod
    def of(cls, split: str, rows: Iterable[Mapping[str, Any]]) -> GivenRows:
        lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        return cls(split, "".join(lines))

    def file(self, folder: Path) -> Path:
        """Where they belong in `folder`: `<digest of the rows>/<split>.jsonl`."""
        return folder / sha256(self.text.encode()).hexdigest()[:12] / f"{self.split}.jsonl"

    def write(self, folder: Path) -> Path:
        """Write that file, whole or not at all, unless it is there. Raises DiskError."""
        file = self.file(folder)
        if not file.is_file():
            write_whole(file, self.text, "run.dir")
        return file


def _row(row: Any, where: str) -> dict[str, Any]:
    if isinstance(row, str):
        return {"prompt": row}
    if not isinstance(row, Mapping):
        raise UserError(
            f"{where} is of type {type(row).__name__}: {shorten(repr(row))}; a row is a dict of "
            "columns, as {'prompt': ..., 'answer': ...}, or a prompt as text"
        )
    try:
        return {str(name): _plain(held, f"{where}, column {name!r}") for name, held in row.items()}
    except RecursionError:
        raise UserError(f"{where} holds itself; leave that column out") from None


def _plain(value: Any, where: str) -> Any:
    """A value for JSON. What pandas has for a missing value becomes null."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, float) and math.isinf(value):
        raise UserError(
            f"{where} holds {value}, which JSON has no room for; give a number that is finite, or "
            "None"
        )
    if isinstance(value, str) and not value.isascii():
        _require_encodable(value, where)
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(held, where) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(held, where) for held in value]
    to_list = getattr(value, "tolist", None)
    if callable(to_list):  # of numpy
        return _plain(to_list(), where)
    raise UserError(
        f"{where} holds {type(value).__name__}, which JSON has no room for: {shorten(repr(value))}"
        "; give texts, numbers, lists and dicts, or leave the column out"
    )


def _require_encodable(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where} holds {shorten(ascii(text))}, half of a character ({error.reason}); decode "
            "the text anew, with errors='replace' for example"
        ) from error
