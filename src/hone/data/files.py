"""The files of a source: names, sizes and tags, on this host or at a URL, and their bytes.

Remote files are read through `fsspec`, by requests for parts of them, each repeated a few times
where it fails. A local path asks nobody.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from hone.data.rows import shorten
from hone.data.settings import SourceBase
from hone.errors import UserError
from hone.extras import import_extra
from hone.hub import unreachable
from hone.paths import (
    DATA_SUFFIXES,
    SAVED_DATASET_FILES,
    data_suffix,
    files_that_match,
    has_wildcards,
    is_url,
    local_path,
    natural_order,
    package_for,
)

__all__ = [
    "DataFile",
    "find_files",
    "is_shorter",
    "look_at",
    "open_file",
    "read_part",
    "require_same",
    "require_unchanged",
]

logger = logging.getLogger(__name__)
T = TypeVar("T")

SPLIT_NAMES = ("train", "test", "validation", "valid", "val", "dev", "eval")

_SUFFIXES = ", ".join(DATA_SUFFIXES)
_WAITS_S = (0.5, 1.0, 2.0, 4.0)
"""Waits before a failed request is repeated, in seconds."""
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError")
"""Errors of `botocore` before it asks a server."""
_REQUEST_BYTES = 8 * 2**20
"""What one request brings of a remote file that is read from its start to its end."""
_TAGS = (
    *("ETag", "etag", "blob_id", "md5Hash", "content_md5", "Content-MD5"),
    *("LastModified", "last_modified", "Last-Modified", "updated", "mtime", "created"),
)
"""Fields of `fsspec` that tell versions of a file apart, the best first: digests, then times."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file with rows, as it was when it was found."""

    name: str
    """Path or URL, as messages name it."""
    size: int
    """In bytes. Of a data set of `datasets` its rows."""
    tag: str
    """What else tells versions of the file apart: the etag of a server, else the time of the last
    change. Empty where a server says neither."""

    @property
    def is_remote(self) -> bool:
        """Whether it is read through `fsspec`."""
        return is_url(self.name)

    @property
    def folder(self) -> Path | None:
        """The folder to which paths in rows are relative; None for a remote file."""
        return None if self.is_remote else Path(self.name).parent


def find_files(source: SourceBase) -> list[DataFile]:
    """The files that the path of a source names, in natural order: a file, those of a folder, those
    that a pattern matches, or the same at a URL.

    Raises UserError where there are none, or where a file has no suffix of `DATA_SUFFIXES`.
    """
    if is_url(source.path):
        return _find_remote(source.path, source.split)
    path = local_path(source.path)
    if path.is_file():
        paths = [path]
    elif path.is_dir():
        inside = [file for file in path.iterdir() if data_suffix(file) and file.is_file()]
        chosen = _of_split(str(path), [str(file) for file in inside], source.split)
        paths = [Path(name) for name in chosen]
    elif has_wildcards(source.path):
        paths = files_that_match(str(path))
        if not paths:
            raise UserError(f"no {_SUFFIXES} file matches {source.path}")
    else:
        raise UserError(f"no such file or folder: {source.path}")
    return [look_at(_with_rows(str(path))) for path in paths]


def look_at(name: str) -> DataFile:
    """A file with its present size and tag. Raises UserError where it is missing."""
    if not is_url(name):
        try:
            found = os.stat(name)
        except OSError as error:
            raise UserError(f"cannot read {name}: {error.strerror}") from error
        return DataFile(name, found.st_size, str(found.st_mtime_ns))
    system, path = _file_system(name)
    system.invalidate_cache(path)
    return _remote_file(name, _asked(name, lambda: system.info(path)))


def require_unchanged(file: DataFile) -> None:
    """Raise UserError where a file is no longer as it was found."""
    require_same(file, look_at(file.name))


def is_shorter(file: DataFile) -> UserError:
    """The error of a file that ends before a place that its index has."""
    return UserError(
        f"{file.name} has become shorter since it was indexed. Put the former file back, or start "
        "anew"
    )


def require_same(before: DataFile, now: DataFile) -> None:
    """Raise UserError, with the name and the difference, where a file has changed."""
    if now == before:
        return
    change = f"it had {before.size:,} bytes and has {now.size:,}"
    if now.size == before.size:
        change = f"it has as many bytes, but its tag was {before.tag} and is {now.tag}"
    raise UserError(
        f"{now.name} has changed since it was indexed: {change}. Put the former file back, or "
        "start anew; rows that are still being written belong into another file"
    )


def open_file(file: DataFile, *, in_order: bool) -> BinaryIO:
    """The bytes of a file that has not changed. `in_order`: it is read from its start to its end,
    else in parts, of which no more is fetched than is asked for."""
    require_unchanged(file)
    if not file.is_remote:
        return open(file.name, "rb")
    raw = _RemoteFile(file)
    return io.BufferedReader(raw, _REQUEST_BYTES) if in_order else raw  # pyright: ignore[reportReturnType]


def read_part(file: DataFile, offset: int, num_bytes: int) -> bytes:
    """Some bytes of a file. Raises UserError where the file ends before."""
    if file.is_remote:
        data = _fetch(file, offset, num_bytes)
    else:
        with open(file.name, "rb") as content:
            content.seek(offset)
            data = content.read(num_bytes)
    if len(data) < num_bytes:
        raise is_shorter(file)
    return data


def _with_rows(name: str) -> str:
    if data_suffix(name) is None:
        raise UserError(f"cannot read {name}: its suffix must be one of {_SUFFIXES}")
    return name


def _of_split(folder: str, names: Sequence[str], split: str) -> list[str]:
    """The data files of a folder, in order; where file names name splits, only those of `split`."""
    if not names:
        raise UserError(
            f"{folder} holds no {_SUFFIXES} files and is no data set saved by `datasets`"
        )
    files = sorted(names, key=natural_order)
    bare = [file.rpartition("/")[2] for file in files]
    splits = [re.split(r"[-_.]", name)[0] for name in bare]
    if not any(name in SPLIT_NAMES for name in splits):
        return files
    chosen = [file for file, name in zip(files, splits, strict=True) if name == split]
    if not chosen:
        raise UserError(f"{folder} has no file for the split {split!r}; found: {', '.join(bare)}")
    if len(chosen) < len(files):
        shown = ", ".join(file.rpartition("/")[2] for file in chosen)
        logger.info("%s: reading split %r: %s", folder, split, shown)
    return chosen


# -- at URLs --------------------------------------------------------------------------------------


def _find_remote(url: str, split: str) -> list[DataFile]:
    system, path = _file_system(url)
    if has_wildcards(url):
        found = _asked(url, lambda: system.glob(path, detail=True))
        infos = {_named(system, name, url): info for name, info in found.items()}
        names = [name for name in infos if data_suffix(name) and infos[name]["type"] == "file"]
        if not names:
            raise UserError(f"no {_SUFFIXES} file matches {url}")
        return [_listed_file(name, infos[name]) for name in sorted(names, key=natural_order)]
    info = _asked(url, lambda: system.info(path))
    if info["type"] != "directory":
        return [_remote_file(_with_rows(url), info)]
    listed = _asked(url, lambda: system.ls(path, detail=True))
    infos = {_named(system, one["name"], url): one for one in listed if one["type"] == "file"}
    if any(name.rpartition("/")[2] in SAVED_DATASET_FILES for name in infos):
        raise UserError(
            f"{url} is a data set saved by `datasets`, which is read from this machine alone: "
            "download it and name its folder"
        )
    chosen = _of_split(url, [name for name in infos if data_suffix(name)], split)
    return [_listed_file(name, infos[name]) for name in chosen]


def _named(system: Any, path: str, url: str) -> str:
    """The URL of a path that a file system has listed, with the protocol of `url`."""
    return path if is_url(path) else f"{url.partition('://')[0]}://{path.lstrip('/')}"


def _remote_file(name: str, info: dict[str, Any]) -> DataFile:
    if info.get("size") is None:
        raise UserError(f"the server does not say how large {name} is; download it and name it")
    return DataFile(name, info["size"], _tag(info))


def _listed_file(name: str, info: dict[str, Any]) -> DataFile:
    """A file of a folder, about which the server is asked only for what the list does not say."""
    is_known = info.get("size") is not None and _tag(info)
    return _remote_file(name, info) if is_known else look_at(name)


def _tag(info: dict[str, Any]) -> str:
    value = next((info[key] for key in _TAGS if info.get(key) is not None), "")
    # A list of files may give a number where the server gives a date for one of them.
    value = value.timestamp() if isinstance(value, datetime) else value
    return f"{value:.6f}" if isinstance(value, float) else str(value)


def _file_system(url: str) -> tuple[Any, str]:
    """The file system of `fsspec` for a URL, and the path there. Raises UserError where it needs a
    package that is missing, and where the hub cannot be reached."""
    import fsspec

    if (package := package_for(url)) is not None:
        import_extra(package, needed_by=f"reading {url}")
    if url.startswith("hf://") and (reason := unreachable()) is not None:
        raise UserError(f"cannot read {url}: {reason}")
    try:
        return fsspec.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise UserError(f"cannot read {url}: {error}") from error


class _RemoteFile(io.RawIOBase):
    """A remote file that is read part by part."""

    def __init__(self, file: DataFile) -> None:
        self._file, self._offset = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._offset = offset + (0, self._offset, self._file.size)[whence]
        return self._offset

    def tell(self) -> int:
        return self._offset

    def readinto(self, buffer: Any, /) -> int:
        num_bytes = max(0, min(len(buffer), self._file.size - self._offset))
        buffer[:num_bytes] = _fetch(self._file, self._offset, num_bytes)
        self._offset += num_bytes
        return num_bytes


class _CutOffError(OSError):
    """An answer that is shorter than what was asked for."""


def _fetch(file: DataFile, offset: int, num_bytes: int) -> bytes:
    """Some bytes of a remote file, which has them. Raises UserError that names file and offset
    where the server does not give them."""
    if not num_bytes:
        return b""
    system, path = _file_system(file.name)

    def ask() -> bytes:
        data = system.cat_file(path, start=offset, end=offset + num_bytes)
        if len(data) < num_bytes:
            raise _CutOffError(f"{len(data):,} bytes came of {num_bytes:,}")
        return data

    data = _asked(file.name, ask, place=f" at byte {offset:,}")
    if len(data) > num_bytes:
        raise UserError(
            f"the server of {file.name} gives no parts of files; download it and name it"
        )
    return data


def _asked(name: str, ask: Callable[[], T], *, place: str = "") -> T:
    """What a request gives, which is repeated where it fails for a moment."""
    for wait in (*_WAITS_S, None):
        try:
            return ask()
        except FileNotFoundError as error:
            raise UserError(f"no such file or folder: {name}") from error
        except _failures() as error:
            problem = shorten(f"{type(error).__name__}: {error}", 200)
            if isinstance(error, PermissionError) or _is_final(error):
                raise UserError(f"cannot read {name}{place}: {problem}") from error
            if wait is None:
                raise UserError(
                    f"cannot read {name}{place}: {len(_WAITS_S) + 1} attempts failed in "
                    f"{sum(_WAITS_S):g} s, the last with {problem}. Start again once the server "
                    "answers, or download the file"
                ) from error
            logger.info("%s%s: %s; asking again in %g s", name, place, problem, wait)
            time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def _failures() -> tuple[type[Exception], ...]:
    """Errors by which file systems of `fsspec` report that a request has failed. Those of their
    libraries count where these are in use."""
    named = (
        ("aiohttp", "ClientError"),
        ("botocore.exceptions", "BotoCoreError"),
        ("gcsfs.retry", "HttpError"),
        ("httpx", "HTTPError"),  # of huggingface_hub
        ("httpx2", "HTTPError"),
    )
    own = [getattr(sys.modules[module], name) for module, name in named if module in sys.modules]
    return (OSError, *own)


def _is_final(error: Exception) -> bool:
    """Whether a request is refused for good, by a server or for want of credentials."""
    if type(error).__name__ in _NO_CREDENTIALS:
        return True
    response = getattr(error, "response", None)
    status = getattr(error, "status", None) or getattr(response, "status_code", None)
    return isinstance(status, int) and 400 <= status < 500 and status not in (408, 429)
