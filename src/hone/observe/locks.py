"""Locks of files, which keep other processes out of a folder: of a run, of the parts of an output,
of an index.

    with (folder / ".lock").open("a") as file:
        take_lock(file, f"run.dir '{folder}'")

The system gives a lock back when its file is closed, however its process ends.
"""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO, Any

from hone.errors import UserError

__all__ = ["NoLocksError", "is_taken", "take_lock"]


class NoLocksError(UserError):
    """Raised for a file on a file system without locks."""


def take_lock(file: IO[Any], place: str, *, waits: bool = False) -> None:
    """Lock an open file for this process until it is closed. `place` is the key that chose the
    place, with its value, for the error.

    Raises BlockingIOError where another process has the lock, unless it `waits` for that one; and
    NoLocksError where the file system has none.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        raise NoLocksError(
            f"the file system of {place} has no locks ({error}), which keep other processes out. "
            "Mount it with locks (Lustre: -o flock), or name a place on another file system."
        ) from error


def is_taken(path: Path) -> bool:
    """Whether a process has the lock of the file. False where there is no such file, and on a file
    system without locks."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
