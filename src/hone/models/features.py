"""Features of contents by their hash: encoded once, kept with a bound in bytes.

    source = FeatureSource(tower, pixels_of, max_bytes=1 << 30)
    contents = source.gather(pieces)          # for the context of a pass

Trainer and engine in one process use the same source, so a group of samples, all its turns and all
its passes encode an image once. Evicted features are encoded again, to the same bits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hone.attention.context import ContentFeatures
from hone.images.pixels import TilePixels
from hone.model_input import ContentPiece
from hone.models.towers import Features, Tower
from hone.observe.host_memory import count_as_cache

__all__ = ["FeatureSource"]


class FeatureSource:
    """The features of one model's contents.

    It has no lock, since it belongs to whichever thread runs the model, and a model is run by one
    thread at a time. An engine or a scorer in a thread of its own has loaded a model, and with it a
    source, for itself. The engine that samples with the trainer's own weights shares the trainer's
    source, and the training thread makes its steps.
    """

    def __init__(
        self,
        tower: Tower,
        pixels_of: Callable[[Sequence[str]], Sequence[TilePixels]],
        *,
        max_bytes: int,
    ) -> None:
        """`pixels_of` gives the pixels of hashes, in their order. `max_bytes` bounds the features
        that are kept between passes, on the tower's device."""
        self.tower = tower
        self.max_bytes = max_bytes
        self._pixels_of = pixels_of
        self._kept: OrderedDict[str, Features] = OrderedDict()
        self._num_bytes = 0
        self.num_encoded = 0
        """Tiles that the tower has encoded."""
        self.num_patches = 0
        """Patches of these tiles."""
        self.busy_s = 0.0
        """Seconds spent on pixels and on starting the tower's passes."""
        count_as_cache(self)

    @property
    def host_bytes(self) -> int:
        """Bytes of the features that are kept in host memory, 0 on a GPU; see `HostCache`."""
        return self._num_bytes if self.tower.device.type == "cpu" else 0

    def __deepcopy__(self, memo: dict[int, Any]) -> FeatureSource:
        return self  # aliases of a model share its features

    def gather(self, pieces: Sequence[ContentPiece]) -> ContentFeatures | None:
        """The features of the content tokens of a pass; None without any. Does not wait for the
        device. Raises KeyError for a hash whose pixels are not known in this process."""
        if not pieces:
            return None
        features = self._of(dict.fromkeys(piece.hash for piece in pieces))
        index = np.concatenate([np.arange(p.place, p.place + p.size) for p in pieces])
        parts = [(features[p.hash], slice(p.offset, p.offset + p.size)) for p in pieces]
        embeds = torch.cat([each.embeds[own] for each, own in parts])
        deep = [each.deepstack[:, own] for each, own in parts if each.deepstack is not None]
        return ContentFeatures(
            index=self._upload(index),
            features=embeds,
            deepstack=torch.cat(deep, dim=1) if deep else None,
        )

    def _of(self, hashes: Iterable[str]) -> dict[str, Features]:
        found: dict[str, Features] = {}
        missing: list[str] = []
        for name in hashes:
            if name in self._kept:
                self._kept.move_to_end(name)
                found[name] = self._kept[name]
            else:
                missing.append(name)
        if missing:
            start = perf_counter()
            tiles = self._pixels_of(missing)
            for name, each in zip(missing, self.tower.encode(tiles), strict=True):
                found[name] = each
                self._keep(name, each)
            self.num_encoded += len(missing)
            self.num_patches += sum(tile.num_patches for tile in tiles)
            self.busy_s += perf_counter() - start
        return found

    def _keep(self, name: str, features: Features) -> None:
        self._kept[name] = features
        self._num_bytes += features.nbytes
        while self._num_bytes > self.max_bytes and self._kept:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= oldest.nbytes

    def _upload(self, index: np.ndarray[Any, Any]) -> Tensor:
        host = torch.from_numpy(index.astype(np.int64))
        device = self.tower.device
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
