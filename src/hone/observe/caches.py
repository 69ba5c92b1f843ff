"""Caches and temporary files of libraries: what to change where one cannot be written.

    if (text := unwritten(error)) is not None:
        print(text)    # Could not write /root/.triton/cache/... (TRITON_CACHE_DIR in the ...

Libraries raise the system's own error, or one that takes a download that found no space for a model
that is not there. Their places are named by variables of the environment, so no key of a recipe
says where they lie.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants

from hone.observe.disk import (
    advice,
    error_number,
    free_bytes,
    is_full,
    sizes,
    temporary_place,
)

__all__ = ["unwritten"]

_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
_OWN = ("DiskError", "CheckpointError")
"""Errors that say what to change. By name: the second one's module loads torch."""
_FULL_BYTES = 1 << 20
"""A place with less space is taken for the one that an error without a path is about."""


def unwritten(error: BaseException) -> str | None:
    """Which place of a library could not be written, and what to change. None where an error has
    another cause, and where hone itself could not write, which says that."""
    for cause in _causes(error):
        if type(cause).__name__ in _OWN:
            return None
        if error_number(cause) in _REFUSED and (found := _place_of(cause)) is not None:
            variable, path = found
            key = f"{variable} in the environment"
            return f"Could not write {path} ({key}): {cause}; {sizes(path, None)}. " + advice(
                cause, key
            )
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _place_of(error: BaseException) -> tuple[str, Path] | None:
    """The variable that names the place of a failed write, and the path. An error that has no path
    is about the first place that is full. One with a path among the temporary files is about any
    file there, and says which."""
    name = getattr(error, "filename", None)
    if isinstance(name, str | os.PathLike):
        path = Path(name).absolute()
        known = (x for x, place in _caches().items() if path.is_relative_to(place.absolute()))
        return next(((variable, path) for variable in known), None)
    if not is_full(error):
        return None
    places = _caches() | {"TMPDIR": temporary_place()}
    return next((x for x in places.items() if free_bytes(x[1]) < _FULL_BYTES), None)


def _caches() -> dict[str, Path]:
    """The places of caches by the variables that name them, the innermost first."""
    set_places = {name: os.environ.get(name) for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE")}
    caches = {name: Path(place) for name, place in set_places.items() if place}
    caches["HF_HOME"] = Path(constants.HF_HOME)
    # Not `Path.home`, which raises where a user has no home folder.
    home = Path("~").expanduser() if "HOME" in os.environ else temporary_place()
    caches["TRITON_CACHE_DIR"] = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton")
    return caches
