"""What Qwen2.5-VL, Qwen3-VL and Qwen3.5 have in common: images keep their shape, in patches of one
size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hone.families.spec import Json
from hone.families.vision.grid_positions import GridPositions
from hone.families.vision.spec import (
    ImageLayout,
    ImageSettings,
    Tile,
    pixels_of,
    setting,
    three,
    token_text,
)
from hone.model_input import InputSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

__all__ = ["BICUBIC", "QwenVision"]

BICUBIC = 3
"""Number of pillow's filter."""
MAX_ASPECT = 200
"""Largest ratio of edges that the family's processor takes."""
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)


class QwenVision:
    """Base of these families."""

    model_type = ""
    patch_size = 14
    mean: tuple[float, float, float] = _MEAN
    std: tuple[float, float, float] = _STD
    inputs = InputSpec(kinds=frozenset({"image"}), positions=GridPositions())
    decoder_prefix = "model.language_model."
    tower_prefixes = ("model.visual.",)

    def settings(
        self, config: Json, processor: Json, *, max_tokens: int | None, tokens: Mapping[str, int]
    ) -> ImageSettings:
        """See `VisionSpec`."""
        placeholder_id = config["image_token_id"]
        placeholder = token_text(tokens, placeholder_id, "image_token_id")
        start, end = (
            token_text(tokens, config[name], name)
            for name in ("vision_start_token_id", "vision_end_token_id")
        )
        patch = setting(processor, "patch_size", config["vision_config"].get("patch_size"))
        patch = patch or self.patch_size
        merge = setting(processor, "merge_size", 2)
        size: Json = setting(processor, "size", {})
        token_pixels = (patch * merge) ** 2
        smallest = processor.get("min_pixels") or size.get("shortest_edge") or 4 * token_pixels
        largest = processor.get("max_pixels") or size.get("longest_edge") or 1280 * token_pixels
        if max_tokens is not None:
            largest = min(largest, max_tokens * token_pixels)
        return ImageSettings(
            family=self.model_type,
            patch_size=patch,
            merge_size=merge,
            min_pixels=min(smallest, largest),
            max_pixels=largest,
            resample=setting(processor, "resample", BICUBIC),
            mean=three(setting(processor, "image_mean", self.mean)),
            std=three(setting(processor, "image_std", self.std)),
            mark=placeholder,
            bare=f"{start}{placeholder}{end}",
            placeholder=placeholder,
            placeholder_id=placeholder_id,
        )

    def layout(self, settings: ImageSettings, height: int, width: int) -> ImageLayout:
        """See `VisionSpec`. Sizes are those of `smart_resize` of Qwen's processors."""
        if max(height, width) > MAX_ASPECT * min(height, width):
            raise ValueError(
                f"is {width} x {height} pixels; {self.model_type} takes images of which one edge "
                f"is at most {MAX_ASPECT} times the other"
            )
        factor = settings.patch_size * settings.merge_size
        rows, columns = round(height / factor), round(width / factor)
        if rows * columns * factor**2 > settings.max_pixels:
            beta = math.sqrt(height * width / settings.max_pixels)
            rows = max(1, math.floor(height / beta / factor))
            columns = max(1, math.floor(width / beta / factor))
        elif rows * columns * factor**2 < settings.min_pixels:
            beta = math.sqrt(settings.min_pixels / (height * width))
            rows = math.ceil(height * beta / factor)
            columns = math.ceil(width * beta / factor)
        if rows * columns * factor**2 > settings.max_pixels:
            raise ValueError(
                f"is {width} x {height} pixels, of which so narrow a picture becomes {rows} x "
                f"{columns} tokens, more than the {settings.max_pixels // factor**2} of one image; "
                "raise data.max_image_tokens, or cut the image"
            )
        tile = Tile(
            height=rows * factor,
            width=columns * factor,
            num_tokens=rows * columns,
            shape=(1, rows, columns),
        )
        return ImageLayout(tiles=(tile,), text=settings.placeholder * tile.num_tokens)

    def tiles(
        self, settings: ImageSettings, image: Image, layout: ImageLayout
    ) -> list[NDArray[np.uint8]]:
        """See `VisionSpec`."""
        (tile,) = layout.tiles
        return [pixels_of(image, (tile.height, tile.width), settings.resample)]
