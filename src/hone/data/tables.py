"""Data sets of the `datasets` library, saved in a folder or from the hub, as blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from hone.data.blocks import Block
from hone.data.files import DataFile
from hone.data.parquet import import_pyarrow
from hone.data.rows import OnBad, SourceRow, shorten
from hone.data.settings import SourceBase
from hone.errors import UserError
from hone.extras import import_extra
from hone.hub import cache_alone, unreachable

__all__ = ["TableBlocks", "load_hub", "load_saved"]

_BLOCK_ROWS = 1024


class TableBlocks:
    """The rows of a data set of `datasets`, which keeps its table on disk."""

    def __init__(self, data: Any, name: str) -> None:
        self.file = DataFile(name, len(data), str(data._fingerprint))
        # As bytes and path, which are not decoded and take a tenth of the memory.
        undecoded = [column for column, kind in data.features.items() if _holds_images(kind)]
        self._pictures = data.select_columns(undecoded).with_format("arrow") if undecoded else None
        self._data = data.remove_columns(undecoded)

    def scan(self) -> Iterator[Block]:
        for row in range(0, self.file.size, _BLOCK_ROWS):
            yield Block(row, row, 0, min(_BLOCK_ROWS, self.file.size - row), 0)

    def walk(self, first: Block | None = None, *, on_bad: OnBad = None) -> Iterator[SourceRow]:
        start = 0 if first is None else first.row
        rows = self._data.select(range(start, self.file.size)) if start else self._data
        for number, columns in enumerate(rows, start=start):
            yield self._row(number, columns)

    def rows(self, block: Block, numbers: Sequence[int] | None) -> list[SourceRow]:
        wanted = range(block.num_rows) if numbers is None else numbers
        return [self._row(block.row + n, self._data[block.row + n]) for n in wanted]

    def access_points(self) -> bytes:
        return b""

    def _row(self, number: int, columns: dict[str, Any]) -> SourceRow:
        own = {}
        if self._pictures is not None:
            own = self._pictures[number : number + 1].to_pylist()[0]
        return SourceRow(columns | own, f"{self.file.name}, row {number + 1}", is_padded=True)


def load_saved(path: Path, split: str) -> TableBlocks:
    """A data set that `datasets` has saved. Raises UserError."""
    datasets, pyarrow = _import_datasets(), import_pyarrow()
    try:
        data = datasets.load_from_disk(str(path))
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise UserError(f"cannot read {path} as a saved data set: {error}") from error
    if isinstance(data, dict):  # DatasetDict
        if split not in data:
            raise UserError(f"{path} has no split {split!r}; found: {', '.join(data)}")
        data = data[split]
    return TableBlocks(data, str(path))


def load_hub(source: SourceBase) -> TableBlocks:
    """A data set of the hub, or of its local cache. Raises UserError."""
    try:
        datasets, pyarrow = _import_datasets(), import_pyarrow()
    except UserError as error:
        raise UserError(
            f"no such file or folder: {source.path}. To read it as a hub name: {error}"
        ) from error
    offline = unreachable()
    try:
        with nullcontext() if offline is None else cache_alone():
            data = datasets.load_dataset(source.path, source.subset, split=source.split)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        if offline is not None:
            raise UserError(
                f"{source.path} is no local file or folder, {offline}, and loading split "
                f"{source.split!r} of it from the local cache failed: {shorten(str(error), 300)}"
            ) from error
        raise UserError(
            f"{source.path} is no local file or folder, and loading split {source.split!r} of it "
            f"from the hub failed: {shorten(str(error), 300)}"
        ) from error
    return TableBlocks(data, source.path)


def _import_datasets() -> Any:
    """The optional `datasets` library."""
    return import_extra("datasets", needed_by="this source")


def _holds_images(feature: Any) -> bool:
    """Whether a feature of `datasets` is an image, or has one inside."""
    if isinstance(feature, dict):
        return any(map(_holds_images, feature.values()))
    if isinstance(feature, list):
        return any(map(_holds_images, feature))
    inner = getattr(feature, "feature", None)
    return type(feature).__name__ == "Image" if inner is None else _holds_images(inner)
