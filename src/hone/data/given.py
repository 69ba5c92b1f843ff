"""Rows that a program passes as objects; a run reads them from a JSONL file.

So a resumed run finds them again, even without the program. Other rows get another folder: rows of
earlier runs are kept, and a changed path in the settings shows that the rows have changed.
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
from hone.images.opening import ImageError, open_image
from hone.images.parts import IMAGE_COLUMNS, data_uri
from hone.observe.whole_file import write_whole

__all__ = ["GivenRows", "given_rows", "is_source"]

_LONGEST_PATH = 4096
_KINDS = (
    "a list of dicts, a pandas DataFrame, a `datasets.Dataset`, or the path or hub name of a data "
    "set"
)


def is_source(data: Any) -> bool:
    """Whether the argument is the path or name of a data set, rather than rows."""
    return isinstance(data, str | Path)


def given_rows(data: Any, name: str) -> list[dict[str, Any]]:
    """JSON rows of a list of dicts or texts, a pandas DataFrame or a `datasets.Dataset`.

    Raises UserError for other arguments; `name` is the argument's name in the message.
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
        """The file of the rows in `folder`: `<digest of the rows>/<split>.jsonl`."""
        return folder / sha256(self.text.encode()).hexdigest()[:12] / f"{self.split}.jsonl"

    def write(self, folder: Path, key: str = "run.dir") -> Path:
        """Write the file atomically, unless it exists. Raises DiskError, which names the `key` that
        chose the folder."""
        file = self.file(folder)
        if not file.is_file():
            write_whole(file, self.text, key)
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
        return {
            str(name): _absolute(str(name), _plain(item, f"{where}, column {name!r}"))
            for name, item in row.items()
        }
    except RecursionError:
        raise UserError(f"{where} contains itself; leave that column out") from None


def _plain(value: Any, where: str) -> Any:
    """A JSON value. NaN, pandas' missing value, becomes null."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, float) and math.isinf(value):
        raise UserError(
            f"{where} holds {value}, which JSON cannot represent; give a finite number, or None"
        )
    if isinstance(value, str) and not value.isascii():
        _require_encodable(value, where)
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, bytes | bytearray) or hasattr(value, "getbands"):  # pillow's images
        return _as_text(value, where)
    if isinstance(value, Path):
        return str(value.absolute())
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    to_list = getattr(value, "tolist", None)
    if callable(to_list):  # numpy arrays and scalars
        return _plain(to_list(), where)
    raise UserError(
        f"{where} holds {type(value).__name__}, which JSON cannot represent: {shorten(repr(value))}"
        "; give texts, numbers, lists and dicts, or leave the column out"
    )


def _as_text(image: Any, where: str) -> str:
    """An image as text. Raises UserError for bytes that are no image."""
    try:
        source = open_image(image, folder=None).source
    except ImageError as error:
        raise UserError(f"{where} holds bytes or an image, which {error}") from error
    assert isinstance(source, bytes)
    return data_uri(source)


def _absolute(name: str, value: Any) -> Any:
    """A column's value with the paths of images from the working directory, which a file elsewhere
    is to hold, as absolute ones."""
    if name not in IMAGE_COLUMNS:
        return value
    if isinstance(value, list):
        return [_absolute(name, item) for item in value]
    is_path = isinstance(value, str) and len(value) < _LONGEST_PATH and Path(value).is_file()
    return str(Path(value).absolute()) if is_path else value


def _require_encodable(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where} holds {shorten(ascii(text))}, half of a character ({error.reason}); decode "
            "the text anew, with errors='replace' for example"
        ) from error
