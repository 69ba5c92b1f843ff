"""Blocks of rows, by format: where those of a file lie, and the rows of one.

A block is a row group of a Parquet file, some lines of a file of JSON lines, or a whole JSON array.
`Blocks` is what all formats offer.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

from hone.data.files import DataFile, open_file, read_part, require_unchanged
from hone.data.rows import BYTE_ORDER_MARK, SourceRow, decode, json_row, parse_json, shorten
from hone.errors import UserError
from hone.extras import import_extra
from hone.paths import data_suffix

__all__ = ["Block", "Blocks", "OpenBlocks", "blocks_of", "import_pyarrow", "is_array"]

_BLOCK_BYTES = 2**20
"""Bytes of lines that make a block, in bytes."""
_SPACING_BYTES = 2**20
_MOST_SPACINGS = 1024
"""Access points of a compressed file are so many bytes apart, and in a large one a share of its
size. Each takes 32 KiB."""
_BATCH_BYTES = 16 * 2**20
_BATCH_ROWS = 4096
"""Bytes and rows of a row group that are turned into Python's values at once."""
_IN_PAGES: dict[str, Any] = {"buffer_size": 2**23, "pre_buffer": False}
"""How a row group is read that is too large to keep: so many bytes of a column at once."""
_HANDLE_BYTES = 2**20
"""What an open file counts among unpacked blocks, in bytes."""


class Block(NamedTuple):
    """Rows that are read together."""

    place: int
    """Number of the row group, else the offset of the first byte in the unpacked file."""
    row: int
    """Number of its first row in the file, counted from 0."""
    line: int
    """Number of its first line in the file, counted from 1; of other formats 0."""
    num_rows: int
    num_bytes: int
    """Unpacked bytes."""


class Blocks(Protocol):
    """The blocks of one file, or of a data set of `datasets`."""

    file: DataFile

    def scan(self) -> Iterator[Block]:
        """All blocks that have rows, in order, each as soon as it is found."""
        ...

    def walk(self) -> Iterator[SourceRow]:
        """All rows in order, without a scan before; memory does not grow with the file."""
        ...

    def rows(self, block: Block, numbers: Sequence[int] | None) -> list[SourceRow]:
        """Rows of a block, of these numbers within it or all. Only these are parsed."""
        ...

    def access_points(self) -> bytes:
        """What `rows` needs beside blocks to find its place in a compressed file; else empty."""
        ...


class OpenBlocks:
    """Unpacked blocks and open files, of which those that were used last stay, up to a number of
    bytes. The last one stays however large it is."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._held: OrderedDict[object, tuple[Any, int]] = OrderedDict()

    def get(self, key: object, unpack: Callable[[], tuple[Any, int]]) -> Any:
        """What is held under a key, else what `unpack` returns, with its bytes."""
        if key not in self._held:
            self._held[key] = unpack()
            self.num_bytes += self._held[key][1]
            while self.num_bytes > self.max_bytes and len(self._held) > 1:
                _, (_, num_bytes) = self._held.popitem(last=False)
                self.num_bytes -= num_bytes
        self._held.move_to_end(key)
        return self._held[key][0]


def blocks_of(file: DataFile, opened: OpenBlocks, access_points: Callable[[], bytes]) -> Blocks:
    """The blocks of a file by its suffix. `access_points` gives those of an index; where it gives
    none they are made."""
    suffix = data_suffix(file.name) or ""
    if suffix == ".parquet":
        return _ParquetBlocks(file, opened)
    if suffix in (".json", ".json.gz") and is_array(file):
        return _ArrayBlocks(file, opened)
    if suffix.endswith(".gz"):
        return _GzipLineBlocks(file, opened, access_points)
    return _LineBlocks(file, opened)


def is_array(file: DataFile) -> bool:
    """Whether a file is one JSON array, which can only be parsed as a whole. Many `.json` data sets
    are JSON lines instead."""
    with _unpacked(file, in_order=False) as content:
        while head := content.read(4096):
            if text := head.removeprefix(BYTE_ORDER_MARK).lstrip():
                return text.startswith(b"[")
    return False


def import_pyarrow() -> Any:
    """pyarrow with its Parquet reader; JSON files do not need it."""
    import_extra("pyarrow", module="pyarrow.parquet", needed_by="this source")
    import pyarrow

    return pyarrow


@contextmanager
def _unpacked(file: DataFile, *, in_order: bool = True) -> Generator[BinaryIO]:
    """The text of a file from its start. Raises UserError for a compressed file that is damaged.
    `in_order` is that of `open_file`."""
    with open_file(file, in_order=in_order) as content:
        if not file.name.partition("?")[0].endswith(".gz"):
            yield content
            return
        try:
            with io.BufferedReader(cast(io.RawIOBase, gzip.open(content)), _BLOCK_BYTES) as text:
                yield text
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UserError(
                f"cannot unpack {file.name}: {error}. It is cut off, damaged or not compressed by "
                "gzip; write it again"
            ) from error


def _verify(file: DataFile, opened: OpenBlocks) -> None:
    """Raise UserError where a file has changed. A server is asked once as long as the answer stays
    in `opened`, this host each time."""
    if file.is_remote:
        opened.get((file.name, "verified"), lambda: (require_unchanged(file), 0))
    else:
        require_unchanged(file)


# -- JSON -----------------------------------------------------------------------------------------


class _LineBlocks:
    def __init__(self, file: DataFile, opened: OpenBlocks) -> None:
        self.file, self._opened, self._folder = file, opened, file.folder

    def scan(self) -> Iterator[Block]:
        with _unpacked(self.file) as content:
            offset, row, line = 0, 0, 1
            while lines := content.readlines(self._block_bytes):
                num_bytes = sum(map(len, lines))
                if not offset:
                    lines[0] = lines[0].removeprefix(BYTE_ORDER_MARK)
                num_rows = len(lines) - sum(map(_is_blank, lines))
                if num_rows:
                    yield Block(offset, row, line, num_rows, num_bytes)
                offset, row, line = offset + num_bytes, row + num_rows, line + len(lines)

    def walk(self) -> Iterator[SourceRow]:
        with _unpacked(self.file) as content:
            for number, line in enumerate(content, start=1):
                # A byte-order mark may open the file; blank lines are no rows.
                line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
                if not _is_blank(line):
                    yield self._row(number, line)

    def rows(self, block: Block, numbers: Sequence[int] | None) -> list[SourceRow]:
        lines = self._opened.get((self.file.name, block.place), lambda: self._lines(block))
        wanted = range(block.num_rows) if numbers is None else numbers
        return [self._row(*lines[number]) for number in wanted]

    def access_points(self) -> bytes:
        return b""

    @property
    def _block_bytes(self) -> int:
        return _BLOCK_BYTES

    def _lines(self, block: Block) -> tuple[list[tuple[int, bytes]], int]:
        """The lines of a block that are rows, with their numbers, and the bytes that they take."""
        lines = io.BytesIO(self._read(block)).readlines()
        if block.place == 0:
            lines[0] = lines[0].removeprefix(BYTE_ORDER_MARK)
        numbered = enumerate(lines, start=block.line)
        rows = [(number, line) for number, line in numbered if not _is_blank(line)]
        return rows, block.num_bytes + 128 * len(rows)

    def _read(self, block: Block) -> bytes:
        _verify(self.file, self._opened)
        return read_part(self.file, block.place, block.num_bytes)

    def _row(self, number: int, line: bytes) -> SourceRow:
        location = f"{self.file.name}, line {number}"
        return json_row(parse_json(decode(line, location), location), location, self._folder)


class _GzipLineBlocks(_LineBlocks):
    def __init__(
        self, file: DataFile, opened: OpenBlocks, access_points: Callable[[], bytes]
    ) -> None:
        super().__init__(file, opened)
        self._known_points = access_points

    @property
    def _block_bytes(self) -> int:
        # As large as access points are apart, since text is unpacked from the point before.
        return max(_BLOCK_BYTES, self.file.size // _MOST_SPACINGS)

    def access_points(self) -> bytes:
        # In a pass of its own: `indexed_gzip` takes the end of a file that is cut off for its end.
        content = io.BytesIO()
        with self._open() as text:
            text.build_full_index()
            text.export_index(fileobj=content)
        return content.getvalue()

    def _read(self, block: Block) -> bytes:
        _verify(self.file, self._opened)
        text = self._opened.get((self.file.name, "unpacked"), self._opened_at_points)
        text.seek(block.place)
        data = text.read(block.num_bytes)
        if len(data) < block.num_bytes:
            raise UserError(f"{self.file.name} has become shorter since it was indexed; start anew")
        return data

    def _opened_at_points(self) -> tuple[Any, int]:
        points = self._known_points() or self.access_points()
        text = self._open()
        text.import_index(fileobj=io.BytesIO(points))
        return text, _HANDLE_BYTES + len(points)

    def _open(self) -> Any:
        indexed_gzip = import_extra("indexed_gzip", needed_by=f"an index of {self.file.name}")
        content = open_file(self.file, in_order=False)
        spacing = max(_SPACING_BYTES, self._block_bytes)
        return indexed_gzip.IndexedGzipFile(fileobj=content, spacing=spacing)


class _ArrayBlocks:
    def __init__(self, file: DataFile, opened: OpenBlocks) -> None:
        self.file, self._opened, self._folder = file, opened, file.folder

    def scan(self) -> Iterator[Block]:
        if values := self._held():
            yield Block(0, 0, 0, len(values), self.file.size)

    def walk(self) -> Iterator[SourceRow]:
        for number, value in enumerate(self._values()):
            yield self._row(number, value)

    def rows(self, block: Block, numbers: Sequence[int] | None) -> list[SourceRow]:
        values = self._held()
        wanted = range(block.num_rows) if numbers is None else numbers
        return [self._row(number, values[number]) for number in wanted]

    def access_points(self) -> bytes:
        return b""

    def _held(self) -> list[Any]:
        key = (self.file.name, "array")
        return self._opened.get(key, lambda: (self._values(), self.file.size))

    def _values(self) -> list[Any]:
        with _unpacked(self.file) as content:
            data = content.read().removeprefix(BYTE_ORDER_MARK)
        return parse_json(decode(data, self.file.name), self.file.name)

    def _row(self, number: int, value: Any) -> SourceRow:
        return json_row(value, f"{self.file.name}, row {number + 1}", self._folder)


def _is_blank(line: bytes) -> bool:
    """Whether a line has nothing but white space, that of Unicode included."""
    return line[:1] != b"{" and not line.decode(errors="replace").strip()


# -- Parquet --------------------------------------------------------------------------------------


class _ParquetBlocks:
    def __init__(self, file: DataFile, opened: OpenBlocks) -> None:
        self.file, self._opened, self._folder = file, opened, file.folder

    def scan(self) -> Iterator[Block]:
        with self._reading() as parquet:
            row = 0
            for number in range(parquet.metadata.num_row_groups):
                group = parquet.metadata.row_group(number)
                if group.num_rows:
                    yield Block(number, row, 0, group.num_rows, group.total_byte_size)
                row += group.num_rows

    def walk(self) -> Iterator[SourceRow]:
        for block in self.scan():
            for number, columns in enumerate(self._in_order(block), start=block.row):
                yield self._row(number, columns)

    def rows(self, block: Block, numbers: Sequence[int] | None) -> list[SourceRow]:
        if block.num_bytes > self._opened.max_bytes:
            values = self._from_large(block, numbers)
        else:
            with self._reading():
                key = (self.file.name, block.place)
                table = self._opened.get(key, lambda: self._table(block))
                if numbers is None:
                    values = table.slice(0, block.num_rows).to_pylist()
                else:
                    values = [table.slice(number, 1).to_pylist()[0] for number in numbers]
        wanted = range(block.num_rows) if numbers is None else numbers
        return [self._row(block.row + n, row) for n, row in zip(wanted, values, strict=True)]

    def access_points(self) -> bytes:
        return b""

    def _in_order(self, block: Block) -> Iterator[dict[str, Any]]:
        """The rows of a block, a few of which are in memory at once."""
        fitting = _BATCH_BYTES * block.num_rows // max(1, block.num_bytes)
        batch_rows = min(max(1, fitting), _BATCH_ROWS)
        with self._reading() as parquet:
            batches = parquet.iter_batches(batch_rows, row_groups=[block.place])
            yield from islice(
                chain.from_iterable(batch.to_pylist() for batch in batches), block.num_rows
            )

    def _from_large(self, block: Block, numbers: Sequence[int] | None) -> list[dict[str, Any]]:
        """Rows of a block that is too large to keep, read up to the last one that is wanted."""
        _verify(self.file, self._opened)
        if numbers is None:
            return list(self._in_order(block))
        wanted = set(numbers)
        head = enumerate(islice(self._in_order(block), max(wanted, default=-1) + 1))
        found = {number: row for number, row in head if number in wanted}
        return [found[number] for number in numbers]

    def _table(self, block: Block) -> tuple[Any, int]:
        _verify(self.file, self._opened)
        with self._reading() as parquet:
            table = parquet.read_row_group(block.place)
        return table, table.nbytes

    @contextmanager
    def _reading(self) -> Generator[Any]:
        """The open file. Raises UserError where it cannot be read."""
        pyarrow = import_pyarrow()
        try:
            yield self._opened.get((self.file.name, "open"), self._open)
        except (pyarrow.ArrowException, OSError) as error:
            problem = shorten(str(error), 200)
            raise UserError(f"cannot read {self.file.name} as Parquet: {problem}") from error

    def _open(self) -> tuple[Any, int]:
        parquet_file = import_pyarrow().parquet.ParquetFile
        require_unchanged(self.file)
        is_remote = self.file.is_remote
        content = open_file(self.file, in_order=False) if is_remote else self.file.name
        parquet = parquet_file(content, pre_buffer=is_remote)
        footer = parquet.metadata
        sizes = (footer.row_group(n).total_byte_size for n in range(footer.num_row_groups))
        if max(sizes, default=0) > self._opened.max_bytes:
            # Page by page: else a column of a row group comes as a whole.
            parquet = parquet_file(content, metadata=footer, **_IN_PAGES)
        return parquet, _HANDLE_BYTES

    def _row(self, number: int, columns: dict[str, Any]) -> SourceRow:
        location = f"{self.file.name}, row {number + 1}"
        return SourceRow(columns, location, self._folder, is_padded=True)
