"""Text files that are written completely or not at all."""

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
def whole_file(path: Path, key: str, num_bytes: int | None = None) -> Generator[TextIO]:
    """Context manager of a UTF-8 file that replaces `path` when the block succeeds. After an error
    `path` is unchanged, and no temporary file is left. Missing folders are created. If several
    processes write the same path, the last one wins. Raises DiskError, which names the `key` that
    chose the place, and `num_bytes` as `writing` does."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with writing(path, key, num_bytes):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with unfinished.open("x", encoding="utf-8") as file:
                yield file
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)


def write_whole(path: Path, text: str, key: str) -> None:
    """Write a UTF-8 file as `whole_file` does. Raises DiskError, which names `key`."""
    with whole_file(path, key, len(text.encode())) as file:
        file.write(text)
