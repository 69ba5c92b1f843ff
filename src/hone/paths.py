"""Paths of models and data sets: files, folders or hub names."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "DATA_SUFFIXES",
    "is_saved_dataset",
    "local_path",
    "must_be_local",
    "settings_file",
    "standing_in",
]

DATA_SUFFIXES = (".jsonl", ".json", ".parquet")
"""Suffixes of files with rows."""
_SAVED_DATASET_FILES = ("dataset_dict.json", "state.json")
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
    """Whether a path cannot be a hub name, `name` or `owner/name`."""
    return (
        path.startswith((".", "/", "~"))
        or path.count("/") > 1
        or path.endswith(("/", *DATA_SUFFIXES))
    )


def settings_file(output: Path) -> Path:
    """The file with the settings of a generation: `a.jsonl.config.yaml` for `a.jsonl`. Each output
    has its own."""
    return output.with_name(f"{output.name}.config.yaml")


def is_saved_dataset(folder: Path) -> bool:
    """Whether the `datasets` library has saved a data set here."""
    return any((folder / name).exists() for name in _SAVED_DATASET_FILES)
