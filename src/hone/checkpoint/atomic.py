"""Atomic folders: a folder exists whole or not at all.

A folder is written under a temporary name, every file is flushed to disk, a manifest with each
file's size and checksum is written last, and one rename publishes the folder. Readers accept a
folder only with an intact manifest and all of its files, so nothing that a killed or failed writer
leaves is taken for a published folder.

    with publish_folder(path) as publication:
        (publication.folder / "weights.bin").write_bytes(...)

The writer uses two hidden names next to `path`: `.<name>.partial` while it writes or deletes, and
`.<name>.retired` for the moment in which a new folder replaces an old one. A folder has one writer
at a time.

Checksums are CRC-32, which finds accidental damage: 0.2 s for a GB on one core, where SHA-256 takes
0.5 to 1.0 s (benchmarks/README.md).
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from hone.distributed.mesh import Mesh
from hone.observe.disk import MANIFEST_NAME, DiskError, advice, free_bytes, sizes

__all__ = [
    "MANIFEST_NAME",
    "CheckpointError",
    "FileRecord",
    "FolderManifest",
    "Publication",
    "clean_leftovers",
    "discard",
    "partial_name",
    "publish_folder",
    "read_manifest",
    "record_file",
    "require_replaceable",
    "together",
    "verify_file",
    "write_tensors",
]

_BLOCK_BYTES = 1 << 22
_FLUSH_BYTES = 1 << 26
"""Bytes between two flushes of a file that is being written, so that the disk works meanwhile."""
_FORMATS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in safetensors."""

T = TypeVar("T")


class CheckpointError(OSError):
    """A folder could not be written, or what is on disk is incomplete or damaged."""


class FileRecord(NamedTuple):
    """One file of a published folder."""

    size: int
    """Bytes."""
    crc32: int


@dataclass(frozen=True, slots=True)
class FolderManifest:
    """The manifest of a published folder."""

    files: Mapping[str, FileRecord]
    """Records by path relative to the folder."""
    metadata: Mapping[str, Any]
    """Metadata of the whole folder, from its writer."""


@dataclass(slots=True)
class Publication:
    """A folder that is being written."""

    folder: Path
    files: dict[str, FileRecord] = field(default_factory=dict[str, FileRecord])
    """Files that `record_file` or `write_tensors` has recorded already, in any process. All others
    are recorded at the end."""
    num_bytes: int | None = None
    """Total size to be written, for the message about a full disk."""


@contextmanager
def publish_folder(
    path: Path,
    *,
    metadata: Mapping[str, Any] | None = None,
    num_bytes: int | None = None,
    ours: Collection[str] = (),
) -> Generator[Publication]:
    """Yield an empty folder to write into; publish it as `path` when the block ends without error.

    A published folder already at `path` is replaced. On any failure the partial folder is removed
    and `path` stays unchanged. `metadata` (JSON) goes into the manifest. `num_bytes` is that of
    `Publication`; nothing is written where the disk has less space. `ours` is that of
    `require_replaceable`.

    Raises CheckpointError when the disk is full or another I/O error occurs, and ValueError when
    `path` holds something that was not published by this function.
    """
    publication = Publication(partial_name(path), num_bytes=num_bytes)
    require_replaceable(path, ours=ours)
    try:
        clean_leftovers(path)
        publication.folder.mkdir(parents=True)
        if num_bytes is not None and num_bytes > free_bytes(publication.folder):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield publication
        _write_manifest(publication, metadata or {})
        _swap_in(publication.folder, path)
    except BaseException as error:  # Ctrl-C and bugs leave nothing behind either
        with suppress(OSError):
            clean_leftovers(path)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"Could not write {path} (run.dir): {error}; "
                f"{sizes(path, publication.num_bytes)}. No partial folder was left. "
                f"{advice(error, 'run.dir')}"
            ) from error
        raise


def require_replaceable(path: Path, *, ours: Collection[str] = ()) -> None:
    """Raise ValueError where `path` exists and `publish_folder` has not published it. A folder that
    has only files named in `ours` may be replaced too: earlier versions wrote them without a
    manifest."""
    if not path.exists() or (path / MANIFEST_NAME).exists():
        return
    if not path.is_dir() or not {item.name for item in path.iterdir()} <= {*ours}:
        raise ValueError(
            f"{path} exists and is not ours to replace. Move it away, or name another folder "
            "(run.dir)."
        )


def together(mesh: Mesh, work: Callable[[], T]) -> T:
    """Call `work` on every process; if it fails on one, raise on all: its own error there, and a
    CheckpointError with the rank and the text elsewhere. Collective."""
    error: OSError | ValueError | None = None
    result: T | None = None
    try:
        result = work()
    except OSError as raised:
        has_message = isinstance(raised, CheckpointError | DiskError)  # one written for users
        error = raised if has_message else CheckpointError(f"a checkpoint failed: {raised}")
        error.__cause__ = None if has_message else raised
    except ValueError as raised:
        error = raised
    failures = mesh.gather(None if error is None else str(error))
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise CheckpointError(f"process {rank}: {failure}")
    return cast(T, result)


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> FileRecord:
    """Write a safetensors file and flush it. Tensors on a device are copied to the host one at a
    time. Raises CheckpointError where writing fails."""
    # Wider dtypes come first, so that each tensor starts at a multiple of its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        tensor, start = tensors[name], end
        end += tensor.nbytes
        header[name] = {
            "dtype": _FORMATS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    contents = (_bytes_of(tensors[name]) for name in order)
    try:
        return _write_file(path, _blocks([len(text).to_bytes(8, "little") + text], contents))
    except OSError as error:
        raise CheckpointError(str(error)) from error


def record_file(path: Path) -> FileRecord:
    """Flush a file that has been written, and return its size and checksum."""
    _flush(path)
    return FileRecord(path.stat().st_size, _crc32_of_file(path))


def read_manifest(folder: Path) -> FolderManifest:
    """Read the manifest of a published folder and check every file's presence and size.

    Raises CheckpointError saying what is missing or damaged. Checksums of files are not computed
    here; see `verify_file`.
    """
    try:
        document = json.loads((folder / MANIFEST_NAME).read_bytes())
        content = document["content"]
        if document["crc32"] != _crc32_of_json(content):
            raise CheckpointError(f"{folder}: {MANIFEST_NAME} is damaged (its checksum differs)")
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


def verify_file(folder: Path, name: str, manifest: FolderManifest) -> None:
    """Raise CheckpointError when a file's content has changed since it was published."""
    if _crc32_of_file(folder / name) != manifest.files[name].crc32:
        raise CheckpointError(f"{folder}: {name} is damaged (its checksum differs)")


def discard(path: Path) -> None:
    """Delete a folder so that no reader ever sees a part of it."""
    partial = partial_name(path)
    shutil.rmtree(partial, ignore_errors=True)
    path.rename(partial)
    shutil.rmtree(partial)


def clean_leftovers(path: Path) -> None:
    """Remove what a dead writer of `path` left; finish or undo its replacement of `path`."""
    shutil.rmtree(partial_name(path), ignore_errors=True)
    retired = _retired_name(path)
    if path.exists():
        shutil.rmtree(retired, ignore_errors=True)
    elif retired.exists():
        retired.rename(path)


def partial_name(path: Path) -> Path:
    """The name of a folder while it is written or deleted."""
    return path.with_name(f".{path.name}.partial")


def _retired_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.retired")


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's values, row-major, on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _blocks(*contents: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """The contents in blocks of at most `_BLOCK_BYTES`."""
    for content in (memoryview(item) for part in contents for item in part):
        for start in range(0, len(content), _BLOCK_BYTES):
            yield content[start : start + _BLOCK_BYTES]


def _write_file(path: Path, blocks: Iterable[memoryview]) -> FileRecord:
    """Write and flush a file. Three things run at the same time: the checksum of a block, the write
    of that block, and the flush of earlier blocks. Nothing is read again for the checksum."""
    size = unflushed = checksum = 0
    flushing: Future[None] | None = None
    with (
        path.open("wb", buffering=0) as file,
        ThreadPoolExecutor(1, "checksum") as summing,
        ThreadPoolExecutor(1, "flush") as flusher,
    ):
        for block in blocks:
            summed = summing.submit(zlib.crc32, block, checksum)
            rest = block
            while rest:  # a write to a nearly full disk may be partial
                rest = rest[file.write(rest) or 0 :]
            checksum = summed.result()
            size += len(block)
            unflushed += len(block)
            if unflushed >= _FLUSH_BYTES and (flushing is None or flushing.done()):
                if flushing is not None:
                    # The system reports a write error only once; the next flush would succeed.
                    flushing.result()
                flushing = flusher.submit(os.fdatasync, file.fileno())
                unflushed = 0
        if flushing is not None:
            flushing.result()
        os.fsync(file.fileno())
    return FileRecord(size, checksum)


def _write_manifest(publication: Publication, metadata: Mapping[str, Any]) -> None:
    folder, known = publication.folder, publication.files
    names = sorted(f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file())
    files = {name: known.get(name) or record_file(folder / name) for name in names}
    content = {"files": files, "metadata": dict(metadata)}
    document = {"content": content, "crc32": _crc32_of_json(content)}
    (folder / MANIFEST_NAME).write_text(json.dumps(document, indent=1))
    _flush(folder / MANIFEST_NAME)
    for directory in [*(item for item in folder.rglob("*") if item.is_dir()), folder]:
        _flush(directory)


def _swap_in(partial: Path, path: Path) -> None:
    retired = _retired_name(path)
    if path.exists():
        path.rename(retired)
    partial.rename(path)
    _flush(path.parent)
    shutil.rmtree(retired, ignore_errors=True)


def _flush(path: Path) -> None:
    """Flush a file's content, or a folder's entries, from memory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _crc32_of_file(path: Path) -> int:
    checksum, block = 0, bytearray(_BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(block):
            checksum = zlib.crc32(memoryview(block)[:size], checksum)
    return checksum


def _crc32_of_json(content: object) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
