"""Reads rows from files, folders, saved data sets and the hub.

A row is a dict of columns with its location, so that a problem can be reported with
`train.jsonl, line 17`.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hone.data.settings import SourceBase
from hone.errors import UserError
from hone.extras import import_extra
from hone.hub import cache_alone, unreachable
from hone.paths import DATA_SUFFIXES, is_saved_dataset, local_path, must_be_local

__all__ = [
    "SourceRow",
    "count_rows",
    "is_json_array",
    "iter_source",
    "read_source",
    "short_name",
    "shorten",
    "source_names",
]

logger = logging.getLogger(__name__)

SPLIT_NAMES = ("train", "test", "validation", "valid", "val", "dev", "eval")


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row of a source, as it was read."""

    columns: dict[str, Any]
    location: str
    """File and line, for messages: `data/train.jsonl, line 17`."""
    folder: Path | None = None
    """The folder of the file, to which paths in the row are relative; None for a data set that is
    no file."""
    is_padded: bool = False
    """Whether objects have nulls for fields that only other rows have, as in Arrow. In JSON a null
    was written on purpose."""


def read_source(source: SourceBase) -> list[SourceRow]:
    """All rows of a source, at most `max_rows`. Raises the errors of `iter_source`."""
    return list(iter_source(source))


def iter_source(source: SourceBase) -> Iterator[SourceRow]:
    """The rows of a source, read one by one, at most `max_rows`.

    JSON arrays, and data sets from the hub, are loaded as a whole. Raises UserError for a source
    that is missing, unreadable or empty, and for a bad row.
    """
    path = local_path(source.path)
    if path.is_file():
        rows = _read_file(path)
    elif is_saved_dataset(path):
        rows = _read_saved(path, source.split)
    elif path.is_dir():
        files = _files_of_split(path, source.split)
        rows = (row for file in files for row in _read_file(file))
    elif must_be_local(source.path):
        raise UserError(f"no such file or folder: {source.path}")
    else:
        rows = _read_hub(source)
    is_empty = True
    for row in islice(rows, source.max_rows):
        is_empty = False
        yield row
    if is_empty:
        raise UserError(f"{source.path} holds no rows")


def count_rows(source: SourceBase) -> int:
    """The number of rows that `iter_source` yields; JSON lines are counted without parsing."""
    path = Path(source.path).expanduser()
    if path.suffix == ".jsonl" and path.is_file():
        with path.open("rb") as lines:
            rows = (line for line in lines if not line.isspace())
            return sum(1 for _ in islice(rows, source.max_rows))
    return sum(1 for _ in iter_source(source))


def is_json_array(path: Path) -> bool:
    """Whether a file is one JSON array, which can only be parsed as a whole. Many `.json` data sets
    are JSON lines instead."""
    with path.open("rb") as file:
        while head := file.read(4096):
            if text := head.removeprefix(b"\xef\xbb\xbf").lstrip():
                return text.startswith(b"[")
    return False


def source_names(sources: Sequence[SourceBase]) -> list[str]:
    """A short, unique name for each source, with which its row ids begin."""
    counts: Counter[str] = Counter()
    names: list[str] = []
    for name in map(short_name, sources):
        counts[name] += 1
        names.append(name if counts[name] == 1 else f"{name}~{counts[name]}")
    return names


def short_name(source: SourceBase) -> str:
    """The file's or folder's name without suffix, or the last part of a hub name."""
    name = os.path.basename(os.path.realpath(Path(source.path).expanduser()))
    for suffix in DATA_SUFFIXES:
        name = name.removesuffix(suffix)
    return name


_GZIP = b"\x1f\x8b"


def shorten(text: str, num_chars: int = 80) -> str:
    """The beginning of a text, on one line, for messages."""
    text = " ".join(text.split())
    return text if len(text) <= num_chars else text[: num_chars - 3] + "..."


def _read_file(path: Path) -> Iterator[SourceRow]:
    if path.suffix == ".jsonl":
        return _read_jsonl(path)
    if path.suffix == ".json":
        return _read_json(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    raise UserError(f"cannot read {path}: its suffix must be one of {', '.join(DATA_SUFFIXES)}")


def _read_jsonl(path: Path) -> Iterator[SourceRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            location = f"{path}, line {number}"
            # A byte-order mark may open the file; blank lines are no rows.
            text = _decode(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, location)
            if text.strip():
                yield _row(_parse_json(text, location), location, path.parent)


def _read_json(path: Path) -> Iterator[SourceRow]:
    if not is_json_array(path):
        yield from _read_jsonl(path)
        return
    text = _decode(path.read_bytes().removeprefix(b"\xef\xbb\xbf"), str(path))
    for number, value in enumerate(_parse_json(text, str(path)), start=1):
        location = f"{path}, row {number}"
        yield _row(value, location, path.parent)


def _read_parquet(path: Path) -> Iterator[SourceRow]:
    pyarrow = _import_pyarrow()
    try:
        file = pyarrow.parquet.ParquetFile(path)
        number = 0
        for batch in file.iter_batches():
            for columns in batch.to_pylist():
                number += 1
                yield SourceRow(columns, f"{path}, row {number}", path.parent, is_padded=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"cannot read {path} as Parquet: {shorten(str(error), 200)}") from error


def _decode(data: bytes, location: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if data.startswith(_GZIP):
            raise UserError(f"{location}: the file is compressed; unpack it (gunzip)") from error
        shown = shorten(data.decode(errors="replace"))
        raise UserError(
            f"{location}: not UTF-8 text ({error.reason}): {shown}. Save the file as UTF-8, for "
            "example with iconv -f ENCODING -t UTF-8"
        ) from error


def _parse_json(text: str, location: str) -> Any:
    try:
        return json.loads(text)
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


def _row(value: Any, location: str, folder: Path) -> SourceRow:
    if not isinstance(value, dict):
        raise UserError(
            f"{location}: a row must be a JSON object with named columns, "
            f"got {type(value).__name__}: {shorten(json.dumps(value))}"
        )
    return SourceRow(value, location, folder)


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """The data files of a folder; where file names name splits, only those of `split`."""
    paths = sorted(path for path in folder.iterdir() if path.suffix in DATA_SUFFIXES)
    files = [path for path in paths if path.is_file()]
    if not files:
        raise UserError(
            f"{folder} holds no {', '.join(DATA_SUFFIXES)} files and is no data set saved by "
            "`datasets`"
        )
    splits = {file: re.split(r"[-_.]", file.stem)[0] for file in files}
    if not any(name in SPLIT_NAMES for name in splits.values()):
        return files
    chosen = [file for file in files if splits[file] == split]
    if not chosen:
        names = ", ".join(file.name for file in files)
        raise UserError(f"{folder} has no file for the split {split!r}; found: {names}")
    if len(chosen) < len(files):
        logger.info("%s: reading split %r: %s", folder, split, ", ".join(f.name for f in chosen))
    return chosen


def _import_pyarrow() -> Any:
    """pyarrow with its Parquet reader; JSON files do not need it."""
    import_extra("pyarrow", module="pyarrow.parquet", needed_by="this source")
    import pyarrow

    return pyarrow


def _import_datasets() -> Any:
    """The optional `datasets` library."""
    return import_extra("datasets", needed_by="this source")


def _read_saved(path: Path, split: str) -> Iterator[SourceRow]:
    datasets, pyarrow = _import_datasets(), _import_pyarrow()
    try:
        data = datasets.load_from_disk(str(path))
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise UserError(f"cannot read {path} as a saved data set: {error}") from error
    if isinstance(data, dict):  # DatasetDict
        if split not in data:
            raise UserError(f"{path} has no split {split!r}; found: {', '.join(data)}")
        data = data[split]
    return _dataset_rows(data, str(path))


def _read_hub(source: SourceBase) -> Iterator[SourceRow]:
    try:
        datasets, pyarrow = _import_datasets(), _import_pyarrow()
    except UserError as error:
        raise UserError(
            f"no such file or folder: {source.path}. To read it as a hub name: {error}"
        ) from error
    offline = unreachable()
    try:
        with nullcontext() if offline is None else cache_alone():
            data = datasets.load_dataset(source.path, source.subset, split=source.split)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        if offline is not None:
            raise UserError(
                f"{source.path} is no local file or folder, {offline}, and loading split "
                f"{source.split!r} of it from the local cache failed: {shorten(str(error), 300)}"
            ) from error
        raise UserError(
            f"{source.path} is no local file or folder, and loading split {source.split!r} of it "
            f"from the hub failed: {shorten(str(error), 300)}"
        ) from error
    return _dataset_rows(data, source.path)


def _dataset_rows(data: Any, name: str) -> Iterator[SourceRow]:
    # As bytes and path, which are not decoded and take a tenth of the memory.
    undecoded = [column for column, kind in data.features.items() if _holds_images(kind)]
    pictures = data.select_columns(undecoded).with_format("arrow") if undecoded else None
    for number, columns in enumerate(data.remove_columns(undecoded), start=1):
        own = {} if pictures is None else pictures[number - 1 : number].to_pylist()[0]
        yield SourceRow(columns | own, f"{name}, row {number}", is_padded=True)


def _holds_images(feature: Any) -> bool:
    """Whether a feature of `datasets` is an image, or has one inside."""
    if isinstance(feature, dict):
        return any(map(_holds_images, feature.values()))
    if isinstance(feature, list):
        return any(map(_holds_images, feature))
    inner = getattr(feature, "feature", None)
    return type(feature).__name__ == "Image" if inner is None else _holds_images(inner)
