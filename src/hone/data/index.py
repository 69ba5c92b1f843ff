"""The index of a source: where the blocks of its rows lie, made without reading rows where the
format allows it, kept in a file, and refused once a file of the source has changed.

    index = SourceIndex.build(source, run_dir / "data")
    first = index.rows(0)           # all rows of the first block
    some = index.rows(7, [3, 0])    # two rows of the eighth one
"""

from __future__ import annotations

import json
import logging
import secrets
import time
import zipfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from functools import partial
from hashlib import blake2b
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hone.data.blocks import (
    ArrayBlocks,
    Block,
    Blocks,
    GzipLineBlocks,
    LineBlocks,
    OpenBlocks,
    is_array,
)
from hone.data.files import DataFile, find_files, require_same
from hone.data.order import BlockSizes
from hone.data.parquet import ParquetBlocks
from hone.data.rows import OnBad, SourceRow
from hone.data.settings import SourceBase
from hone.data.tables import TableBlocks, load_hub, load_saved
from hone.errors import UserError
from hone.observe.disk import writing
from hone.observe.locks import NoLocksError, take_lock
from hone.paths import data_suffix, is_saved_dataset, is_url, local_path, must_be_local

__all__ = ["BLOCK", "MAX_OPEN_BYTES", "SourceIndex", "no_rows", "walk"]

logger = logging.getLogger(__name__)

BLOCK = np.dtype(
    [
        ("file", "<u4"),
        ("num_rows", "<u4"),
        ("place", "<u8"),
        ("row", "<u8"),
        ("line", "<u8"),
        ("num_bytes", "<u8"),
    ]
)
"""A block in the arrays of an index: the number of its file, and the fields of `Block`."""
MAX_OPEN_BYTES = 256 * 2**20
"""Unpacked blocks that an index keeps, in bytes."""

_FORMAT = 1
"""Number of the layout of cached indexes; another layout gets another number."""
_PROGRESS_S = 2.0
_SHOWN_BYTES = 100_000_000
"""A pass over so many bytes of lines is logged, also where it is a short one."""


class SourceIndex:
    """The blocks of a source, and their rows. One thread may use it at a time."""

    def __init__(
        self,
        source: SourceBase,
        parts: Sequence[Blocks],
        blocks: npt.NDArray[Any],
        opened: OpenBlocks,
    ) -> None:
        """`parts` are the files, in order, `blocks` is an array of the dtype `BLOCK`, [b], and
        `opened` holds what is unpacked. Use `build` or `to_walk`, which find all of these."""
        self.source, self.blocks = source, blocks
        self._parts, self._opened = parts, opened
        num_rows = blocks["num_rows"].astype(np.int64)
        self.sizes = BlockSizes(
            first_rows=np.cumsum(num_rows) - num_rows,
            num_rows=num_rows,
            num_bytes=blocks["num_bytes"].astype(np.int64),
        )
        """Rows and bytes of the blocks."""

    @classmethod
    def build(
        cls,
        source: SourceBase,
        cache: Path | None = None,
        *,
        max_open_bytes: int = MAX_OPEN_BYTES,
        least_kept_bytes: int = 0,
    ) -> SourceIndex:
        """The index of a source, of its first `max_rows` rows.

        It is read from the folder `cache` if it is there and no file has changed; else it is made,
        and written there, by one of the processes of a host while the others wait; that of files
        of less than `least_kept_bytes` is made each time. Raises UserError for a source that is
        missing, unreadable or without rows, and DiskError, which names `run.dir`, where the index
        cannot be written.
        """
        opened = OpenBlocks(max_open_bytes)
        table = _table(source)
        files = [] if table is not None else find_files(source)
        if cache is None or sum(file.size for file in files) < max(least_kept_bytes, 1):
            parts = _parts(files, opened, None) if table is None else [table]
            return cls(source, parts, _scanned(source, parts), opened)
        kept = _kept(source, cache)
        parts = _parts(files, opened, kept)
        blocks = _kept_or_made(kept, source, parts, "run.dir", has_access_points=True)
        return cls(source, parts, blocks, opened)

    @classmethod
    def to_walk(
        cls, source: SourceBase, cache: Path | None = None, *, must_be_same: bool = False
    ) -> SourceIndex:
        """An index for `walk`, which is made without the access points of compressed files, and
        kept in `cache` whatever the size of the files.

        Raises UserError as `build`, and with `must_be_same` for a file that is not as it was when
        the index was kept; and DiskError, which names `output`.
        """
        opened = OpenBlocks(MAX_OPEN_BYTES)
        table = _table(source)
        parts = _parts(find_files(source), opened, None) if table is None else [table]
        if cache is None:
            return cls(source, parts, _scanned(source, parts), opened)
        kept = _kept(source, cache)
        blocks = _kept_or_made(
            kept, source, parts, "output", has_access_points=False, must_be_same=must_be_same
        )
        return cls(source, parts, blocks, opened)

    @property
    def files(self) -> list[DataFile]:
        """The files, in order. A data set of `datasets` is one."""
        return [part.file for part in self._parts]

    @property
    def num_rows(self) -> int:
        """Rows of all blocks."""
        return int(self.blocks["num_rows"].sum())

    def all_rows(self) -> list[SourceRow]:
        """The rows of all blocks."""
        return [row for block in range(len(self.blocks)) for row in self.rows(block)]

    @property
    def fingerprint(self) -> str:
        """A hex digest of the files' names without folders, sizes and tags, and of the blocks."""
        known = [[_bare(file.name), file.size, file.tag] for file in self.files]
        digest = blake2b(json.dumps(known).encode(), digest_size=16)
        digest.update(self.blocks.tobytes())
        return digest.hexdigest()

    def rows(self, block: int, numbers: Sequence[int] | None = None) -> list[SourceRow]:
        """Rows of a block: those of some numbers, counted from 0 within the block, or all.

        The blocks that were unpacked last stay in memory. Of a row group larger than that all rows
        before the wanted ones are read each time. Raises UserError where the file has changed.
        """
        file, found = self._block(block)
        for number in numbers or ():
            if not 0 <= number < found.num_rows:
                raise IndexError(f"row {number} of block {block}, which has {found.num_rows}")
        return self._parts[file].rows(found, numbers)

    def walk(self, start: int = 0) -> Iterator[SourceRow]:
        """The rows of all blocks, one after another, from the row with the number `start` on.

        The blocks before that of the first row are not read; lines of its own file are unpacked
        from their beginning where it is compressed. Raises UserError where a file has changed.
        """
        if not 0 <= start < self.num_rows:
            raise IndexError(f"row {start} of a source that has {self.num_rows}")
        number = int(np.searchsorted(self.sizes.first_rows, start, side="right")) - 1
        file, first = self._block(number)
        later = chain.from_iterable(part.walk() for part in self._parts[file + 1 :])
        skipped = start - int(self.sizes.first_rows[number])
        rows = chain(self._parts[file].walk(first), later)
        return islice(rows, skipped, skipped + self.num_rows - start)

    def _block(self, number: int) -> tuple[int, Block]:
        """A block, with the number of its file."""
        file, num_rows, place, row, line, num_bytes = (int(x) for x in self.blocks[number])
        return file, Block(place, row, line, num_rows, num_bytes)


def walk(source: SourceBase, on_bad: OnBad = None) -> Iterator[SourceRow]:
    """All rows of a source, one after another, without an index of them. `on_bad` is called for
    what cannot be read; without it UserError is raised."""
    for open_part in _unopened_parts(source):
        try:
            yield from open_part().walk(on_bad=on_bad)
        except UserError as error:
            if on_bad is None:
                raise
            on_bad(error)


def _unopened_parts(source: SourceBase) -> list[Callable[[], Blocks]]:
    """What opens each file. It is looked into when its turn comes, and what was open of those
    before is forgotten."""
    table = _table(source)
    if table is not None:
        return [lambda: table]
    return [partial(_opened_part, file) for file in find_files(source)]


def _opened_part(file: DataFile) -> Blocks:
    return _parts([file], OpenBlocks(MAX_OPEN_BYTES), None)[0]


def _table(source: SourceBase) -> TableBlocks | None:
    """The data set of `datasets` that a source names, if it names one."""
    if is_url(source.path):
        return None
    path = local_path(source.path)
    if is_saved_dataset(path):
        return load_saved(path, source.split)
    is_here = path.exists() or must_be_local(source.path)
    return None if is_here else load_hub(source)


def _parts(files: Sequence[DataFile], opened: OpenBlocks, kept: Path | None) -> list[Blocks]:
    """The blocks of each file. `kept` is the cached index that has their access points."""

    def points_of(number: int) -> Callable[[], bytes]:
        return lambda: b"" if kept is None else _access_points(kept, number)

    return [_blocks_of(file, opened, points_of(number)) for number, file in enumerate(files)]


def _blocks_of(file: DataFile, opened: OpenBlocks, access_points: Callable[[], bytes]) -> Blocks:
    """The blocks of a file by its suffix. `access_points` gives those of an index; where it gives
    none they are made."""
    suffix = data_suffix(file.name) or ""
    if suffix == ".parquet":
        return ParquetBlocks(file, opened)
    if suffix in (".json", ".json.gz") and is_array(file):
        return ArrayBlocks(file, opened)
    if suffix.endswith(".gz"):
        return GzipLineBlocks(file, opened, access_points)
    return LineBlocks(file, opened)


def _scan(source: SourceBase, parts: Iterable[Blocks]) -> Iterator[tuple[int, Block]]:
    """The blocks of the first `max_rows` rows, each with the number of its file."""
    left = source.max_rows
    progress = _Progress(source)
    for number, block in ((n, x) for n, part in enumerate(parts) for x in part.scan()):
        progress(block)
        if left is None:
            yield number, block
            continue
        yield number, block._replace(num_rows=min(block.num_rows, left))
        left -= block.num_rows
        if left <= 0:
            break
    if not progress.num_blocks:
        raise no_rows(source)
    progress.end()


def no_rows(source: SourceBase) -> UserError:
    """The error of a source without rows."""
    return UserError(
        f"{source.path} holds no rows; write rows to it, name another path, or remove the source"
    )


def _scanned(source: SourceBase, parts: Sequence[Blocks]) -> npt.NDArray[Any]:
    found = (
        (number, block.num_rows, block.place, block.row, block.line, block.num_bytes)
        for number, block in _scan(source, parts)
    )
    return np.fromiter(found, dtype=BLOCK)


class _Progress:
    """Says how fast lines are found: once after some seconds, and at the end."""

    def __init__(self, source: SourceBase) -> None:
        self.num_blocks = 0
        self._source, self._num_bytes = source, 0
        self._start, self._is_told = time.monotonic(), False

    def __call__(self, block: Block) -> None:
        self.num_blocks += 1
        self._num_bytes += block.num_bytes if block.line else 0
        elapsed = time.monotonic() - self._start
        if not self._is_told and elapsed > _PROGRESS_S and self._num_bytes:
            self._is_told = True
            logger.info("%s: finding where its rows begin, at %s", self._source.path, self._rate)

    def end(self) -> None:
        """Say what the pass took, where it was a long one."""
        if self._num_bytes >= _SHOWN_BYTES:
            logger.info(
                "%s: found where its rows begin, in %.1f s at %s",
                self._source.path,
                time.monotonic() - self._start,
                self._rate,
            )

    @property
    def _rate(self) -> str:
        rate = self._num_bytes / (time.monotonic() - self._start) / 1e6
        return f"{rate:,.0f} MB/s"


def _bare(name: str) -> str:
    return name.rpartition("/")[2]


# -- the cache ------------------------------------------------------------------------------------


def _digest(source: SourceBase) -> str:
    """A hex digest of what decides which rows a source has."""
    path = source.path if is_url(source.path) else str(local_path(source.path).absolute())
    known = [_FORMAT, path, source.split, source.subset, source.max_rows]
    return blake2b(json.dumps(known).encode(), digest_size=8).hexdigest()


def _kept(source: SourceBase, cache: Path) -> Path:
    """The file of a source's index."""
    return cache / f"index-{_digest(source)}.npz"


@contextmanager
def _locked(path: Path, key: str) -> Generator[None]:
    """Keep other processes out of the block, where the file system has locks: without them each
    makes the index, and the last one is kept. Raises DiskError, which names `key`."""
    with writing(path.parent, key):
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("w")
    with opened as file:
        try:
            take_lock(file, f"'{path.parent}'", waits=True)
        except NoLocksError as error:
            logger.warning("Each process makes the index of the data: %s", error)
        yield


def _read(
    kept: Path, files: Sequence[DataFile], *, must_be_same: bool = False
) -> npt.NDArray[Any] | None:
    """The blocks of a cached index; None where there is none, or files have changed since. With
    `must_be_same` that raises UserError."""
    if not kept.is_file():
        return None
    try:
        with np.load(kept, allow_pickle=False) as arrays:
            known = json.loads(arrays["files"].tobytes())
            blocks = arrays["blocks"]
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        logger.warning("%s is damaged (%s) and is made anew", kept, error)
        return None
    if known == [list(astuple(file)) for file in files]:
        return blocks
    if must_be_same:
        _require_same([DataFile(*values) for values in known], files)
        return blocks
    logger.info("%s is made anew: files of its source have changed", kept)
    return None


def _require_same(before: Sequence[DataFile], now: Sequence[DataFile]) -> None:
    """Raise UserError where files are not those of before, but for the folder that they are in."""
    for earlier, later in zip_longest(before, now):
        if later is None or (earlier is not None and _bare(earlier.name) != _bare(later.name)):
            raise UserError(
                f"{earlier.name} was there when its source was indexed, and "
                f"{'nothing' if later is None else later.name} is in its place. Put the former "
                "files back, or start anew"
            )
        if earlier is None:
            raise UserError(
                f"{later.name} was not there when its source was indexed. Take it out, or start "
                "anew"
            )
        require_same(replace(earlier, name=later.name), later)


def _kept_or_made(
    kept: Path,
    source: SourceBase,
    parts: Sequence[Blocks],
    key: str,
    *,
    has_access_points: bool,
    must_be_same: bool = False,
) -> npt.NDArray[Any]:
    """The blocks of a cached index, which is made and written where there is none that fits, by one
    process at a time. Raises UserError as `SourceIndex.to_walk`, and DiskError with `key`."""
    with _locked(kept.with_suffix(".lock"), key):
        blocks = _read(kept, [part.file for part in parts], must_be_same=must_be_same)
        if blocks is None:
            blocks = _scanned(source, parts)
            _write(kept, parts, blocks, key, has_access_points=has_access_points)
    return blocks


def _write(
    kept: Path,
    parts: Sequence[Blocks],
    blocks: npt.NDArray[Any],
    key: str,
    *,
    has_access_points: bool,
) -> None:
    """Write an index, whole or not at all. Raises DiskError."""
    files = json.dumps([astuple(part.file) for part in parts]).encode()
    arrays = {"files": np.frombuffer(files, np.uint8), "blocks": blocks}
    for number in np.unique(blocks["file"]) if has_access_points else ():
        if points := parts[number].access_points():
            arrays[_points_name(number)] = np.frombuffer(points, np.uint8)
    partial = kept.with_suffix(f".{secrets.token_hex(4)}.partial")
    with writing(kept, key, sum(array.nbytes for array in arrays.values())):
        try:
            with partial.open("wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
            partial.replace(kept)
        finally:
            partial.unlink(missing_ok=True)


def _access_points(kept: Path, number: int) -> bytes:
    with np.load(kept, allow_pickle=False) as arrays:
        name = _points_name(number)
        return arrays[name].tobytes() if name in arrays else b""


def _points_name(number: int) -> str:
    return f"points_{number}"
