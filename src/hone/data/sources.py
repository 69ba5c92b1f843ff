"""Reads rows from files, folders, URLs, saved data sets and the hub.

A row is a dict of columns with its location, so that a problem can be reported with
`train.jsonl, line 17`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from itertools import chain, count
from pathlib import Path

from hone.data import index
from hone.data.blocks import is_array
from hone.data.files import look_at
from hone.data.rows import OnBad, SourceRow, shorten
from hone.data.settings import SourceBase
from hone.errors import UserError
from hone.paths import data_suffix, has_wildcards, is_url

__all__ = [
    "SourceRow",
    "is_json_array",
    "iter_source",
    "read_source",
    "short_name",
    "shorten",
    "source_names",
]


def read_source(source: SourceBase) -> list[SourceRow]:
    """All rows of a source, at most `max_rows`. Raises the errors of `iter_source`."""
    return list(iter_source(source))


def iter_source(source: SourceBase, on_bad: OnBad = None) -> Iterator[SourceRow]:
    """The rows of a source, read one by one, at most `max_rows`, counting those that `on_bad` is
    told of.

    JSON arrays are parsed as a whole, and data sets from the hub are loaded as a whole. Raises
    UserError for a source that is missing, unreadable or empty, and for a bad row and the rest of a
    bad file of which `on_bad` is not told.
    """
    most = math.inf if source.max_rows is None else source.max_rows
    num_read = 0

    def bad(error: UserError) -> None:
        nonlocal num_read
        if on_bad is not None and num_read < most:
            num_read += 1
            on_bad(error)

    for row in index.walk(source, None if on_bad is None else bad):
        if num_read >= most:
            return
        num_read += 1
        yield row
        if num_read >= most:
            return
    if not num_read:
        raise index.no_rows(source)


def is_json_array(path: Path) -> bool:
    """Whether a file is one JSON array, which can only be parsed as a whole. Many `.json` data sets
    are JSON lines instead."""
    return is_array(look_at(str(path)))


def source_names(sources: Sequence[SourceBase]) -> list[str]:
    """A short, unique name for each source, with which its row ids begin."""
    names: list[str] = []
    for name in map(short_name, sources):
        further = (f"{name}~{number}" for number in count(2))
        names.append(next(each for each in chain([name], further) if each not in names))
    return names


def short_name(source: SourceBase) -> str:
    """The file's or folder's name without suffix, the last part of a hub name, or the folder of a
    pattern."""
    path = source.path
    while has_wildcards(path) and not Path(path).expanduser().exists():
        path = path.rpartition("/")[0]
    if is_url(path):
        name = path.partition("?")[0].rstrip("/").rpartition("/")[2]
    else:
        name = os.path.basename(os.path.realpath(Path(path).expanduser()))
    return name.removesuffix(data_suffix(name) or "")
