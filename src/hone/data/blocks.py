"""Blocks of rows: what every format offers, and those of JSON.

A block is a row group of a Parquet file (`hone.data.parquet`), some lines of a file of JSON lines,
a whole JSON array, or rows of a data set of `datasets` (`hone.data.tables`).
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar, cast

from hone.data.files import DataFile, is_shorter, open_file, read_part, require_unchanged
from hone.data.rows import BYTE_ORDER_MARK, OnBad, SourceRow, decode, json_row, parse_json
from hone.errors import UserError
from hone.extras import import_extra

__all__ = [
    "HANDLE_BYTES",
    "ArrayBlocks",
    "Block",
    "Blocks",
    "GzipLineBlocks",
    "LineBlocks",
    "OpenBlocks",
    "is_array",
    "verify",
]

V = TypeVar("V")

_BLOCK_BYTES = 2**20
"""Bytes of lines that make a block, in bytes."""
_SPACING_BYTES = 2**20
_MOST_SPACINGS = 1024
"""Access points of a compressed file are so many bytes apart, and in a large one a share of its
size. Each takes 32 KiB."""
HANDLE_BYTES = 2**20
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

    def walk(self, first: Block | None = None, *, on_bad: OnBad = None) -> Iterator[SourceRow]:
        """All rows in order, or those of the block `first` and of the blocks after it. Needs no
        scan before; memory does not grow with the file. `on_bad` is called for what
        cannot be read; without it UserError is raised."""
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


def is_array(file: DataFile) -> bool:
    """Whether a file is one JSON array, which can only be parsed as a whole. Many `.json` data sets
    are JSON lines instead."""
    with _unpacked(file, in_order=False) as content:
        while head := content.read(4096):
            if text := head.removeprefix(BYTE_ORDER_MARK).lstrip():
                return text.startswith(b"[")
    return False


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


def verify(file: DataFile, opened: OpenBlocks) -> None:
    """Raise UserError where a file has changed. A server is asked once as long as the answer stays
    in `opened`, this host each time."""
    if file.is_remote:
        opened.get((file.name, "verified"), lambda: (require_unchanged(file), 0))
    else:
        require_unchanged(file)


# -- JSON -----------------------------------------------------------------------------------------


class LineBlocks:
    """Lines of a file of JSON lines, a MiB in each block."""

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

    def walk(self, first: Block | None = None, *, on_bad: OnBad = None) -> Iterator[SourceRow]:
        with _unpacked(self.file) as content:
            if first is not None:
                content.seek(first.place)  # a compressed file is unpacked up to there
            lines = (
                # A byte-order mark may open the file; blank lines are no rows.
                (number, line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line)
                for number, line in enumerate(content, start=1 if first is None else first.line)
            )
            rows = ((number, line) for number, line in lines if not _is_blank(line))
            yield from _made(rows, self._row, on_bad)

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
        verify(self.file, self._opened)
        return read_part(self.file, block.place, block.num_bytes)

    def _row(self, number: int, line: bytes) -> SourceRow:
        location = f"{self.file.name}, line {number}"
        return json_row(parse_json(decode(line, location), location), location, self._folder)


class GzipLineBlocks(LineBlocks):
    """The same of a compressed file, whose places are those of the unpacked one."""

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
        verify(self.file, self._opened)
        text = self._opened.get((self.file.name, "unpacked"), self._opened_at_points)
        text.seek(block.place)
        data = text.read(block.num_bytes)
        if len(data) < block.num_bytes:
            raise is_shorter(self.file)
        return data

    def _opened_at_points(self) -> tuple[Any, int]:
        points = self._known_points() or self.access_points()
        text = self._open()
        text.import_index(fileobj=io.BytesIO(points))
        return text, HANDLE_BYTES + len(points)

    def _open(self) -> Any:
        indexed_gzip = import_extra("indexed_gzip", needed_by=f"an index of {self.file.name}")
        content = open_file(self.file, in_order=False)
        spacing = max(_SPACING_BYTES, self._block_bytes)
        return indexed_gzip.IndexedGzipFile(fileobj=content, spacing=spacing)


class ArrayBlocks:
    """A JSON array, which is one block and is parsed as a whole."""

    def __init__(self, file: DataFile, opened: OpenBlocks) -> None:
        self.file, self._opened, self._folder = file, opened, file.folder

    def scan(self) -> Iterator[Block]:
        if values := self._held():
            yield Block(0, 0, 0, len(values), self.file.size)

    def walk(self, first: Block | None = None, *, on_bad: OnBad = None) -> Iterator[SourceRow]:
        # Held, so that a scan before has parsed it for both.
        yield from _made(enumerate(self._held()), self._row, on_bad)

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


def _made(
    numbered: Iterable[tuple[int, V]], make: Callable[[int, V], SourceRow], on_bad: OnBad
) -> Iterator[SourceRow]:
    """The rows that `make` makes of numbered values."""
    for number, value in numbered:
        try:
            row = make(number, value)
        except UserError as error:
            if on_bad is None:
                raise
            on_bad(error)
        else:
            yield row


def _is_blank(line: bytes) -> bool:
    """Whether a line has nothing but white space, that of Unicode included."""
    return line[:1] != b"{" and not line.decode(errors="replace").strip()
