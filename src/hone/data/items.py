"""Several items of each row: the two completions of a pair as single ones.

Item `n` is a part of row `n // k`, where every row has k items. So what reads rows by number reads
items by number, without a table of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from hone.data.order import BlockSizes
from hone.data.sources import SourceRow
from hone.data.streamed import IndexedRows

__all__ = ["RowsOfItems"]


class RowsOfItems:
    """Blocks of items, each with its row, from blocks of rows. Implements `IndexedRows`."""

    def __init__(self, rows: IndexedRows, per_row: int) -> None:
        self._rows, self._per_row = rows, per_row

    @property
    def sizes(self) -> BlockSizes:
        """Items and bytes of the blocks."""
        sizes = self._rows.sizes
        return BlockSizes(
            first_rows=sizes.first_rows * self._per_row,
            num_rows=sizes.num_rows * self._per_row,
            num_bytes=sizes.num_bytes,
        )

    @property
    def fingerprint(self) -> str:
        """That of the rows."""
        return self._rows.fingerprint

    def rows(self, block: int, numbers: Sequence[int], /) -> list[SourceRow]:
        """The rows of items of a block, by the numbers of items within it; each is read once."""
        wanted = list(dict.fromkeys(number // self._per_row for number in numbers))
        found = dict(zip(wanted, self._rows.rows(block, wanted), strict=True))
        return [found[number // self._per_row] for number in numbers]
