"""Pixels of this process by content hash.

A hash is a digest of an image's bytes and of the settings by which it is processed, so one store
serves every model and data set of a process. Pixels are made where they are first asked for, or
come from another process with the requests or rows that need them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hone.families.vision.spec import ImageSettings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["STORE", "PixelStore", "TilePixels", "TileSource"]


class TilePixels(NamedTuple):
    """The pixels of one tile, with the settings by which they were made."""

    values: NDArray[np.uint8]  # [H, W, 3]
    settings: ImageSettings

    @property
    def num_patches(self) -> int:
        """Number of patches that the tower cuts it into."""
        height, width, _ = self.values.shape
        return height * width // self.settings.patch_size**2


class TileSource(Protocol):
    """What can make the pixels of one tile, at any time and always the same."""

    def pixels(self) -> TilePixels: ...


class PixelStore:
    """Pixels by hash."""

    def __init__(self) -> None:
        self._sources: dict[str, TileSource] = {}

    def register(self, sources: Mapping[str, TileSource]) -> None:
        """Add tiles that this process can make pixels of."""
        self._sources |= sources

    def pixels(self, hashes: Sequence[str]) -> list[TilePixels]:
        """The pixels of tiles, in the order of `hashes`. Raises KeyError for an unknown one."""
        return [self._sources[name].pixels() for name in hashes]


STORE = PixelStore()
"""The store of this process."""
