"""Telling paths from hub names, for models and data sets alike."""

from __future__ import annotations

__all__ = ["DATA_SUFFIXES", "must_be_local"]

DATA_SUFFIXES = (".jsonl", ".json", ".parquet")
"""Files that hold rows."""


def must_be_local(path: str) -> bool:
    """Whether a path cannot be a hub name, which is `name` or `owner/name`."""
    return (
        path.startswith((".", "/", "~"))
        or path.count("/") > 1
        or path.endswith(("/", *DATA_SUFFIXES))
    )
