"""The pixels of an image's tiles, and the hash that stands for them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from hone.families.vision.registry import VISION
from hone.families.vision.spec import ImageLayout, ImageSettings
from hone.images.opening import ImageFile, load_rgb

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["TilePixels", "TileSource", "content_hash", "layout_of", "make_tiles"]


class TilePixels(NamedTuple):
    """The pixels of one tile, with the settings by which they were made."""

    values: NDArray[np.uint8]  # [H, W, 3]
    settings: ImageSettings

    @property
    def num_patches(self) -> int:
        """Number of patches that the tower cuts it into."""
        height, width, _ = self.values.shape
        return height * width // self.settings.patch_size**2


@dataclass(frozen=True, slots=True)
class TileSource:
    """An image and the settings from which the pixels of one tile are made, the same each time."""

    file: ImageFile
    settings: ImageSettings
    number: int
    """Place of the tile among those of its image."""
    location: str = ""
    """Place of the image in the data, for messages: `data/train.jsonl, line 17: image 2`."""

    @property
    def image(self) -> tuple[str, ImageSettings]:
        """The digest of the file and the settings, which all tiles of an image share."""
        return self.file.digest, self.settings

    def pixels(self) -> TilePixels:
        """The pixels, made here and now. Raises ImageError."""
        return make_tiles(self.file, self.settings)[self.number]

    def __str__(self) -> str:
        source = self.file.source
        name = f"an image of {len(source):,} bytes" if isinstance(source, bytes) else str(source)
        return self.location or name


def make_tiles(file: ImageFile, settings: ImageSettings) -> list[TilePixels]:
    """The pixels of all tiles of an image. Raises ImageError where it cannot be decoded."""
    tiles = VISION[settings.family].tiles(settings, load_rgb(file), layout_of(file, settings))
    return [TilePixels(values, settings) for values in tiles]


def layout_of(file: ImageFile, settings: ImageSettings) -> ImageLayout:
    """The tokens of an image. Raises ValueError, as a predicate, for a size that the family does
    not take."""
    return VISION[settings.family].layout(settings, file.height, file.width)


def content_hash(digest: str, settings: ImageSettings, number: int) -> str:
    """The hash of a tile's pixels: a digest of the file's bytes, the settings and the tile's place,
    which determine the pixels and their features. Nothing is decoded for it."""
    text = f"{digest} {_digest(settings)} {number}"
    return blake2b(text.encode(), digest_size=16).hexdigest()


@lru_cache(maxsize=64)
def _digest(settings: ImageSettings) -> str:
    text = json.dumps(asdict(settings), sort_keys=True)
    return blake2b(text.encode(), digest_size=16).hexdigest()
