"""Paths of models and data sets: files, folders or hub names."""

from __future__ import annotations

import glob
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "DATA_SUFFIXES",
    "SAVED_DATASET_FILES",
    "data_suffix",
    "files_that_match",
    "has_wildcards",
    "is_saved_dataset",
    "is_url",
    "local_path",
    "must_be_local",
    "natural_order",
    "package_for",
    "settings_file",
    "standing_in",
]

DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".json.gz")
"""Suffixes of files with rows."""
SAVED_DATASET_FILES = ("dataset_dict.json", "state.json")
"""Files of which a folder has one if `datasets` has saved it."""
_PACKAGES = {
    "abfs": "adlfs",
    "az": "adlfs",
    "gcs": "gcsfs",
    "gs": "gcsfs",
    "http": "aiohttp",
    "https": "aiohttp",
    "s3": "s3fs",
    "s3a": "s3fs",
}
_OF_THE_WEB = ("http://", "https://")
_STAND_INS: dict[str, Path] = {}


def local_path(path: str) -> Path:
    """The path on this host from which the data set `path` is read; it need not exist."""
    return _STAND_INS.get(path) or Path(path).expanduser()


@contextmanager
def standing_in(files: Mapping[str, Path]) -> Generator[None]:
    """Read data sets of these paths, which no run has written yet, from `files` in the block."""
    _STAND_INS.update(files)
    try:
        yield
    finally:
        for path in files:
            _STAND_INS.pop(path, None)


def must_be_local(path: str) -> bool:
    """Whether a path cannot be a hub name, `name` or `owner/name`. That of a URL cannot either."""
    return (
        path.startswith((".", "/", "~"))
        or path.count("/") > 1
        or has_wildcards(path)
        or path.endswith(("/", *DATA_SUFFIXES))
    )


def settings_file(output: Path) -> Path:
    """The file with the settings of a generation: `a.jsonl.config.yaml` for `a.jsonl`. Each output
    has its own."""
    return output.with_name(f"{output.name}.config.yaml")


def is_saved_dataset(folder: Path) -> bool:
    """Whether the `datasets` library has saved a data set here."""
    return any((folder / name).exists() for name in SAVED_DATASET_FILES)


def is_url(path: str) -> bool:
    """Whether a path names a place of another machine, as `s3://bucket/rows.parquet` does."""
    return "://" in path


def package_for(url: str) -> str | None:
    """The package, of those in `hone.extras.INSTALL`, that reads from such URLs; None where none is
    known."""
    return _PACKAGES.get(url.partition("://")[0].rpartition("::")[2])


def has_wildcards(path: str) -> bool:
    """Whether a path is a pattern for several files: `shards/*.parquet`."""
    if path.startswith(_OF_THE_WEB):
        return "*" in path.partition("?")[0]  # behind it is the query
    return any(sign in path for sign in "*?[")


def files_that_match(pattern: str) -> list[Path]:
    """The local files with rows that a pattern matches, in natural order. `**` stands for any
    folders."""
    found = (Path(name) for name in glob.iglob(pattern, recursive=True) if data_suffix(name))
    return sorted((path for path in found if path.is_file()), key=lambda x: natural_order(str(x)))


def data_suffix(path: Path | str) -> str | None:
    """The suffix of `DATA_SUFFIXES` that a file has; None for a file of another format."""
    name = str(path)
    if name.startswith(_OF_THE_WEB):
        name = name.partition("?")[0]
    return next((suffix for suffix in DATA_SUFFIXES if name.endswith(suffix)), None)


def natural_order(path: str) -> list[list[str | int]]:
    """A key that sorts paths with numbers by these: `part-2` comes before `part-10`."""
    return [
        [int(x) if index % 2 else x for index, x in enumerate(re.split(r"([0-9]+)", part))]
        for part in path.split("/")
    ]
