"""Finds and reads the file that `source FILE` of a shell script names. It is never run."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from hone.tools.imports.conditions import is_known

__all__ = ["NotRead", "Sourced", "read_sourced"]

_MAX_BYTES = 256 * 1024
"""Largest file that is read: one that sets variables is far smaller."""


class NotRead(Exception):
    """Raised if a file is not read; the message says why, and what to do."""


class Sourced(NamedTuple):
    """A file that was read."""

    path: str
    """Path relative to the folder of the import."""
    text: str
    is_guess: bool
    """Whether only the end of its name is known."""


def read_sourced(name: str, folders: Sequence[str]) -> Sourced:
    """Read the first regular file of a name in `folders`.

    If only a run could tell the beginning of the name (`$ROOT/models/a.sh`), its end counts
    (`models/a.sh`). Raises NotRead if there is no such file, or it is no text of a usual size.
    """
    end = name if is_known(name) else _known_end(name)
    if not end:
        raise NotRead(
            "only a run of the script could tell which file that is. Set its variables in the "
            "script itself."
        )
    places = dict.fromkeys(os.path.normpath(os.path.join(folder, end)) for folder in folders)
    path = next(filter(os.path.isfile, places), None)
    if path is None:
        if existing := next(filter(os.path.exists, places), None):
            raise NotRead(f"'{existing}' is no regular file. Name a file of shell commands.")
        where = "" if os.path.isabs(end) else " here or in the folder of the script"
        raise NotRead(
            f"there is no file '{end}'{where}. Put it there, or set its variables in the script."
        )
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise NotRead(f"'{path}' cannot be opened: {error.strerror}. Make it readable.") from error
    except UnicodeDecodeError as error:
        raise NotRead(f"'{path}' is no text in UTF-8. Name a file of shell commands.") from error
    if len(data) > _MAX_BYTES:
        raise NotRead(
            f"'{path}' has more than {_MAX_BYTES // 1024} KiB. Set the variables that the script "
            "needs of it in the script itself."
        )
    return Sourced(path, text, is_guess=end != name)


def _known_end(name: str) -> str:
    """The end of a path after its last unknown part. Empty if the path ends with it."""
    end = re.split(r"\$\w+|[)}`]", name)[-1]
    return end[1:] if end.startswith("/") else ""
