"""Folders that exist whole or not at all.

A folder is written aside, every file is flushed to disk, a manifest with each file's size and hash
goes in last, and one rename publishes it. Readers accept a folder only with its manifest intact and
every file there in full; nothing that a killed or failed writer leaves is ever mistaken for one.

    with publish_folder(path) as folder:
        (folder / "weights.bin").write_bytes(...)

Beside `path` the writer uses two hidden names: `.<name>.partial` while it writes or deletes, and
`.<name>.retired` for the instant in which a new folder takes the place of an old one. A folder has
one writer at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from hone.observe.disk import sizes

__all__ = [
    "MANIFEST_NAME",
    "CheckpointError",
    "FileRecord",
    "FolderManifest",
    "clean_leftovers",
    "discard",
    "publish_folder",
    "read_manifest",
    "record_file",
    "verify_file",
]

MANIFEST_NAME = "hone_manifest.json"


class CheckpointError(OSError):
    """A folder could not be written, or what is on disk is incomplete or damaged."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a published folder."""

    size: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True, slots=True)
class FolderManifest:
    """What a published folder holds."""

    files: Mapping[str, FileRecord]
    """By path relative to the folder."""
    metadata: Mapping[str, Any]
    """What the writer said about the folder as a whole."""


@contextmanager
def publish_folder(
    path: Path,
    *,
    metadata: Mapping[str, Any] | None = None,
    num_bytes: int | None = None,
    recorded: Mapping[str, FileRecord] | None = None,
) -> Generator[Path]:
    """Yield an empty folder to write into; publish it as `path` when the block ends well.

    A published folder already at `path` is replaced. On any failure the partial folder is removed
    and what was at `path` stays. `metadata` (JSON) goes into the manifest; `num_bytes` is what the
    caller expects to write, for the error message. `recorded` may be filled by the block: files
    that are flushed and hashed already (`record_file`), by whichever process wrote them.

    Raises CheckpointError when the disk is full or another I/O error occurs, and ValueError when
    `path` holds something that was not published by this function.
    """
    partial = _partial(path)
    if path.exists() and not (path / MANIFEST_NAME).exists() and not _is_empty(path):
        raise ValueError(f"{path} exists and is not ours to replace. Name another folder.")
    try:
        clean_leftovers(path)
        partial.mkdir(parents=True)
        yield partial
        _write_manifest(partial, metadata or {}, recorded or {})
        _swap_in(partial, path)
    except BaseException as error:  # Ctrl-C and bugs leave nothing behind either
        with suppress(OSError):
            clean_leftovers(path)
        if isinstance(error, OSError | SafetensorError):
            raise CheckpointError(_explain(error, path, num_bytes)) from error
        raise


def read_manifest(folder: Path) -> FolderManifest:
    """Read the manifest of a published folder and check every file's presence and size.

    Raises CheckpointError saying what is missing or damaged. Hashes are not computed here, see
    `verify_file`.
    """
    try:
        document = json.loads((folder / MANIFEST_NAME).read_bytes())
        content = document["content"]
        if document["sha256"] != _sha256_of_json(content):
            raise CheckpointError(f"{folder}: {MANIFEST_NAME} is damaged (its hash differs)")
        manifest = FolderManifest(
            files={name: FileRecord(*record) for name, record in content["files"].items()},
            metadata=content["metadata"],
        )
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: {MANIFEST_NAME} is missing") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: {MANIFEST_NAME} is damaged ({error})") from error
    for name, record in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{folder}: {name} is missing") from None
        if size != record.size:
            raise CheckpointError(f"{folder}: {name} has {size} bytes, not {record.size}")
    return manifest


def verify_file(folder: Path, name: str, manifest: FolderManifest) -> Path:
    """Hash one file and return its path; CheckpointError when its content has changed."""
    if _sha256_of_file(folder / name) != manifest.files[name].sha256:
        raise CheckpointError(f"{folder}: {name} is damaged (its sha256 differs)")
    return folder / name


def discard(path: Path) -> None:
    """Delete a folder so that no reader ever sees a part of it."""
    partial = _partial(path)
    shutil.rmtree(partial, ignore_errors=True)
    path.rename(partial)
    shutil.rmtree(partial)


def clean_leftovers(path: Path) -> None:
    """Remove what a dead writer of `path` left; finish or undo its replacement of `path`."""
    shutil.rmtree(_partial(path), ignore_errors=True)
    retired = retired_name(path)
    if path.exists():
        shutil.rmtree(retired, ignore_errors=True)
    elif retired.exists():
        retired.rename(path)


def retired_name(path: Path) -> Path:
    """Where the old folder is while a new one takes its place at `path`."""
    return path.with_name(f".{path.name}.retired")


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def record_file(path: Path) -> FileRecord:
    """Size and hash of a file that has been written, once it is on disk."""
    _flush(path)
    return FileRecord(path.stat().st_size, _sha256_of_file(path))


def _write_manifest(
    folder: Path, metadata: Mapping[str, Any], recorded: Mapping[str, FileRecord]
) -> None:
    files: dict[str, tuple[int, str]] = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            name = file.relative_to(folder).as_posix()
            record = recorded.get(name) or record_file(file)
            files[name] = record.size, record.sha256
    # Through JSON once, so that the hash is of what a reader will parse.
    content = json.loads(json.dumps({"files": files, "metadata": dict(metadata)}))
    document = {"content": content, "sha256": _sha256_of_json(content)}
    (folder / MANIFEST_NAME).write_text(json.dumps(document, indent=1))
    _flush(folder / MANIFEST_NAME)
    for directory in [*(item for item in folder.rglob("*") if item.is_dir()), folder]:
        _flush(directory)


def _swap_in(partial: Path, path: Path) -> None:
    retired = retired_name(path)
    if path.exists():
        path.rename(retired)
    partial.rename(path)
    _flush(path.parent)
    shutil.rmtree(retired, ignore_errors=True)


def _flush(path: Path) -> None:
    """Have a file's content, or a folder's entries, on disk and not only in memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_of_json(content: object) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _explain(error: Exception, path: Path, num_bytes: int | None) -> str:
    return (
        f"Could not write {path} (run.dir): {error}; {sizes(path, num_bytes)}. No partial folder "
        "was left. Free some space or set run.dir to another place."
    )
