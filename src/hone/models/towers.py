"""Towers: transformers' vision encoders behind one method, frozen.

    tower = Tower(family, modules)
    features = tower.encode(tiles)         # one `Features` a tile

Pixels arrive in 8 bits and are scaled, normalised and cut into patches on the tower's device. A
tile has the same features alone and among others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hone.families.vision.spec import MAX_PATCHES, ImageSettings
from hone.images.pixels import TilePixels
from hone.models.tower_attention import TOWER_ATTENTION

__all__ = ["TOWERS", "Features", "Tower"]


@dataclass(frozen=True, slots=True)
class Features:
    """The features of one tile of n tokens."""

    embeds: Tensor  # [n, D], in place of embeddings
    deepstack: Tensor | None = None  # [K, n, D], added to the output of the first K layers

    @property
    def nbytes(self) -> int:
        return self.embeds.nbytes + (0 if self.deepstack is None else self.deepstack.nbytes)


class Tower(ABC):
    """The frozen encoder of one model."""

    def __init__(self, whole: Any) -> None:
        """Takes the encoder's modules out of `whole`, a model of transformers of the family."""
        self.modules = self._modules_of(whole).requires_grad_(False).eval()

    @staticmethod
    @abstractmethod
    def _modules_of(whole: Any) -> nn.ModuleDict:
        """The modules of the tower by their names in `whole.model`."""

    @abstractmethod
    def _encode(self, pixels: list[Tensor], settings: ImageSettings) -> list[Features]:
        """Features of pictures [3, H, W] of float32, in [0, 1] and normalised."""

    @property
    def device(self) -> torch.device:
        return next(self.modules.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.modules.parameters()).dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters."""
        return sum(parameter.nbytes for parameter in self.modules.parameters())

    # Not inference tensors, whoever asks first: training saves what follows from them.
    @torch.inference_mode(False)
    @torch.no_grad()
    def encode(self, tiles: Sequence[TilePixels]) -> list[Features]:
        """The features of each tile, on the tower's device. Tiles are encoded together, in passes
        of at most `MAX_PATCHES` patches."""
        return [
            features
            for some in _passes(tiles)
            for features in self._encode([self._normal(tile) for tile in some], some[0].settings)
        ]

    def _normal(self, tile: TilePixels) -> Tensor:
        """Pixels [3, H, W] of a tile in float32, scaled and normalised, with the bits that the
        processor of transformers gives."""
        values = torch.from_numpy(np.array(tile.values))  # a copy: shared memory may be read-only
        if self.device.type == "cuda":
            values = values.pin_memory().to(self.device, non_blocking=True)
        table = torch.from_numpy(_normal_values(tile.settings)).to(self.device)
        return torch.stack([table[c][values[..., c].int()] for c in range(3)])


@lru_cache
def _normal_values(settings: ImageSettings) -> NDArray[np.float32]:
    """The scaled and normalised value of each of the 256 values of a colour, [3, 256], computed by
    the operations of transformers' processors, so that features have the same bits."""
    scaled = (np.arange(256) * (1 / 255)).astype(np.float32)
    mean, std = (np.array(x, np.float32)[:, None] for x in (settings.mean, settings.std))
    return (scaled - mean) / std


def _passes(tiles: Sequence[TilePixels]) -> Iterator[list[TilePixels]]:
    """Tiles in their order, in lists that one pass encodes."""
    for _, same in groupby(tiles, key=lambda tile: tile.settings):
        some: list[TilePixels] = []
        num_patches = 0
        for tile in same:
            if some and num_patches + tile.num_patches > MAX_PATCHES:
                yield some
                some, num_patches = [], 0
            some.append(tile)
            num_patches += tile.num_patches
        yield some


class QwenTower(Tower):
    """Tower of Qwen2.5-VL, Qwen3-VL and Qwen3.5, which encodes pictures of any sizes together."""

    def __init__(self, whole: Any) -> None:
        super().__init__(whole)
        visual: Any = self.modules["visual"]
        visual.config._attn_implementation = TOWER_ATTENTION

    @staticmethod
    def _modules_of(whole: Any) -> nn.ModuleDict:
        return nn.ModuleDict({"visual": whole.model.visual})

    def _encode(self, pixels: list[Tensor], settings: ImageSettings) -> list[Features]:
        visual: Any = self.modules["visual"]
        patches = torch.cat([_patches(each, settings) for each in pixels]).to(self.dtype)
        edges = [(each.shape[1], each.shape[2]) for each in pixels]
        grids = [(1, h // settings.patch_size, w // settings.patch_size) for h, w in edges]
        output = visual(patches, grid_thw=torch.tensor(grids, device=self.device))
        sizes = [h * w // settings.merge_size**2 for _, h, w in grids]
        embeds = output.pooler_output.split(sizes)
        layers = getattr(output, "deepstack_features", None)
        if not layers:
            return [Features(each.clone()) for each in embeds]
        deepstack = torch.stack(list(layers)).split(sizes, dim=1)
        return [
            Features(each.clone(), deep.clone())
            for each, deep in zip(embeds, deepstack, strict=True)
        ]


def _patches(pixels: Tensor, settings: ImageSettings) -> Tensor:
    """Patches [P, 3 * 2 * p * p] of a picture [3, H, W], those of a token one after the other; each
    picture is two equal frames."""
    patch, merge = settings.patch_size, settings.merge_size
    _, height, width = pixels.shape
    rows, columns = height // (patch * merge), width // (patch * merge)
    parts = pixels.view(3, rows, merge, patch, columns, merge, patch).permute(1, 4, 2, 5, 0, 3, 6)
    frames = parts.unsqueeze(5).expand(*parts.shape[:5], 2, patch, patch)
    return frames.reshape(rows * columns * merge**2, -1)


class GemmaTower(Tower):
    """SigLIP with Gemma 3's projection."""

    @staticmethod
    def _modules_of(whole: Any) -> nn.ModuleDict:
        names = ("vision_tower", "multi_modal_projector")
        return nn.ModuleDict({name: getattr(whole.model, name) for name in names})

    def _encode(self, pixels: list[Tensor], settings: ImageSettings) -> list[Features]:
        states = self.modules["vision_tower"](
            pixel_values=torch.stack(pixels).to(self.dtype)
        ).last_hidden_state
        return [Features(each.clone()) for each in self.modules["multi_modal_projector"](states)]


class SmolTower(Tower):
    """SigLIP with SmolVLM's connector."""

    @staticmethod
    def _modules_of(whole: Any) -> nn.ModuleDict:
        names = ("vision_model", "connector")
        return nn.ModuleDict({name: getattr(whole.model, name) for name in names})

    def _encode(self, pixels: list[Tensor], settings: ImageSettings) -> list[Features]:
        values = torch.stack(pixels).to(self.dtype)
        side = settings.edge // settings.patch_size
        mask = torch.ones(len(values), side, side, dtype=torch.bool, device=self.device)
        states = self.modules["vision_model"](
            pixel_values=values, patch_attention_mask=mask
        ).last_hidden_state
        return [Features(each.clone()) for each in self.modules["connector"](states)]


TOWERS: dict[str, type[Tower]] = {
    "qwen2_5_vl": QwenTower,
    "qwen3_vl": QwenTower,
    "qwen3_5": QwenTower,
    "gemma3": GemmaTower,
    "smolvlm": SmolTower,
}
"""The tower of each vision-language family."""
