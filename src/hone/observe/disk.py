"""Writing to disk, with errors that name the path, the configuration key and exact sizes.

with writing(path, "run.dir", num_bytes=len(data)):
    path.write_bytes(data)
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

__all__ = [
    "MANIFEST_NAME",
    "TEMPORARY",
    "AppendedFile",
    "DiskError",
    "advice",
    "error_number",
    "free_bytes",
    "is_full",
    "sizes",
    "temporary_directory",
    "temporary_folder",
    "temporary_place",
    "write_rate",
    "writing",
]

MANIFEST_NAME = "hone_manifest.json"
"""Manifest file, written last, which makes the folder of a checkpoint or a model complete."""

TEMPORARY = "TMPDIR in the environment"
"""What chooses the place of temporary files, for errors."""


class DiskError(OSError):
    """Raised when a file cannot be written."""


@contextmanager
def writing(path: Path, key: str, num_bytes: int | None = None) -> Generator[None]:
    """Context manager that turns a failed write into a DiskError. The message has `path`, the
    configuration `key` that chose it, `num_bytes` (the size of the write), and the free space."""
    try:
        yield
    except DiskError:
        raise
    except (OSError, SafetensorError) as error:
        raise DiskError(
            f"Could not write {path} ({key}): {error}; {sizes(path, num_bytes)}. "
            f"{advice(error, key)}"
        ) from error


def advice(error: BaseException, key: str) -> str:
    """A sentence on what to change where a write has failed at a place that `key` names."""
    if is_full(error):
        return f"Free some space or set {key} to another place."
    return f"Set {key} to a place that can be written."


def is_full(error: BaseException) -> bool:
    """Whether a write has failed for want of space."""
    return error_number(error) in (errno.ENOSPC, errno.EDQUOT)


def temporary_folder(prefix: str, parent: Path | None = None) -> Path:
    """Make a folder in `parent`, by default where the system keeps temporary files. The caller
    removes it. Raises DiskError, which names TMPDIR."""
    with writing(parent or temporary_place(), TEMPORARY):
        return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))


def temporary_directory(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """A folder that is removed when the context ends. Raises DiskError as `temporary_folder`."""
    with writing(temporary_place(), TEMPORARY):
        return tempfile.TemporaryDirectory(prefix=prefix)


def temporary_place() -> Path:
    """Where temporary files are kept, for errors: `tempfile` fails where it finds no such place."""
    return Path(tempfile.tempdir or os.environ.get("TMPDIR") or "/tmp")


def sizes(path: Path, num_bytes: int | None) -> str:
    """Describe sizes, as `it needs 4,096 bytes, 512 bytes are free there`, without the first part
    if `num_bytes` is None."""
    free = f"{free_bytes(path.absolute().parent):,} bytes are free there"
    return free if num_bytes is None else f"it needs {num_bytes:,} bytes, {free}"


def free_bytes(path: Path) -> int:
    """Free bytes below `path`, or below its nearest existing parent folder."""
    path = path.absolute()
    # Not `Path.exists`, which raises where a folder above may not be entered.
    there = next(folder for folder in (path, *path.parents) if os.path.exists(folder))
    return shutil.disk_usage(there).free


def write_rate(folder: Path, num_bytes: int) -> float:
    """Write speed in bytes per second, measured with a temporary file below `folder`, flushed.
    Raises DiskError if it does not fit."""
    path, block = folder / f".rate.{secrets.token_hex(4)}", os.urandom(1 << 22)
    try:
        with writing(path, "run.dir", num_bytes), path.open("wb", buffering=0) as file:
            start = time.perf_counter()
            rest = num_bytes
            while rest:
                rest -= file.write(block[:rest]) or 0
            os.fsync(file.fileno())
            return num_bytes / (time.perf_counter() - start)
    finally:
        path.unlink(missing_ok=True)


def error_number(error: BaseException) -> int | None:
    """The `errno` of a failed write; None for another error. Libraries in Rust have it only in
    their messages."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    match = re.search(r"\(os error (\d+)\)", str(error))
    return None if match is None else int(match[1])


class AppendedFile:
    """A file that grows by whole records: each is written completely or not at all. `key` is the
    configuration key that chose the place, for errors."""

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key = path, key
        with writing(path, key):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)

    def write(self, record: bytes) -> None:
        """Append a record. Raises DiskError, and removes any part of the record, if it does not
        fit."""
        with writing(self._path, self._key, len(record)):
            end = self._file.seek(0, os.SEEK_END)
            try:
                rest = memoryview(record)
                while rest:  # a full disk accepts only a part
                    rest = rest[self._file.write(rest) or 0 :]
            except OSError:
                self._file.truncate(end)
                raise

    def close(self) -> None:
        self._file.close()
