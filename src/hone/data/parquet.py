"""Blocks of Parquet files, which are their row groups."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

from hone.data.blocks import HANDLE_BYTES, Block, OpenBlocks, verify
from hone.data.files import DataFile, open_file, require_unchanged
from hone.data.rows import OnBad, SourceRow, shorten
from hone.errors import UserError
from hone.extras import import_extra

__all__ = ["ParquetBlocks", "import_pyarrow"]

_BATCH_BYTES = 16 * 2**20
_BATCH_ROWS = 4096
"""Bytes and rows of a row group that are turned into Python's values at once."""
_IN_PAGES: dict[str, Any] = {"buffer_size": 2**23, "pre_buffer": False}
"""How a row group is read that is too large to keep: so many bytes of a column at once."""


def import_pyarrow() -> Any:
    """pyarrow with its Parquet reader; JSON files do not need it."""
    import_extra("pyarrow", module="pyarrow.parquet", needed_by="this source")
    import pyarrow

    return pyarrow


class ParquetBlocks:
    """The row groups of a Parquet file, of which one larger than `OpenBlocks` is never whole."""

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

    def walk(self, first: Block | None = None, *, on_bad: OnBad = None) -> Iterator[SourceRow]:
        for block in self.scan():
            if first is not None and block.place < first.place:
                continue
            try:
                for number, columns in enumerate(self._in_order(block), start=block.row):
                    yield self._row(number, columns)
            except UserError as error:
                if on_bad is None:
                    raise
                on_bad(error)

    def rows(self, block: Block, numbers: Sequence[int] | None) -> list[SourceRow]:
        if block.num_bytes > self._opened.max_bytes:
            values = self._from_large(block, numbers)
        else:
            with self._reading():
                key = (self.file.name, block.place)
                table = self._opened.get(key, lambda: self._table(block))
                if numbers is None:
                    values = table.slice(0, block.num_rows).to_pylist()
                elif isinstance(numbers, range) and numbers.step == 1:
                    values = table.slice(numbers.start, len(numbers)).to_pylist()
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
        verify(self.file, self._opened)
        if numbers is None:
            return list(self._in_order(block))
        wanted = set(numbers)
        head = enumerate(islice(self._in_order(block), max(wanted, default=-1) + 1))
        found = {number: row for number, row in head if number in wanted}
        return [found[number] for number in numbers]

    def _table(self, block: Block) -> tuple[Any, int]:
        verify(self.file, self._opened)
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
        return parquet, HANDLE_BYTES

    def _row(self, number: int, columns: dict[str, Any]) -> SourceRow:
        location = f"{self.file.name}, row {number + 1}"
        return SourceRow(columns, location, self._folder, is_padded=True)
