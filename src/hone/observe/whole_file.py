"""Text files that exist whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from hone.observe.disk import writing

__all__ = ["whole_file", "write_whole"]


@contextmanager
def whole_file(path: Path) -> Generator[TextIO]:
    """A UTF-8 file that appears at `path`, in place of any other, when the block ends well.

    After an error `path` is as it was, and nothing lies beside it. Missing folders are made.
    Several processes may write one path: the last to end well has it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with unfinished.open("x", encoding="utf-8") as file:
            yield file
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_whole(path: Path, text: str, key: str) -> None:
    """Write a UTF-8 file as `whole_file` does. Raises DiskError, which names `key`."""
    with writing(path, key, len(text.encode())), whole_file(path) as file:
        file.write(text)
