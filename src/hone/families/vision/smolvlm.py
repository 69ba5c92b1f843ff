"""SmolVLM: an image is divided into square tiles, with marks of their rows and columns, and a tile
of the whole. The decoder is Llama's, with one position a token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from hone.families.spec import Json
from hone.families.vision.siglip import siglip_cost
from hone.families.vision.spec import (
    ImageLayout,
    ImageSettings,
    Tile,
    TowerCost,
    pixels_of,
    require_tokens,
    setting,
    three,
    tile_edge,
    token_text,
)
from hone.model_input import InputSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

__all__ = ["SPEC"]

LANCZOS = 1
MAX_EDGE = 4096
"""Longest edge that the family's processor resizes an image to."""
_AROUND, _GLOBAL = "<fake_token_around_image>", "<global-img>"


class SmolVision:
    """See `VisionSpec`."""

    model_type = "smolvlm"
    inputs = InputSpec(kinds=frozenset({"image"}))
    decoder_prefix = "model.text_model."
    tower_prefixes = ("model.vision_model.", "model.connector.")
    defaults: ClassVar[Json] = {
        "text_config": {"model_type": "llama"},
        "vision_config": {
            "hidden_size": 1152,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
        },
    }

    @property
    def public(self) -> dict[str, Json]:
        """See `VisionSpec`."""
        return {
            f"smolvlm2-{name}": _config(numbers, tower, scale)
            for name, numbers, tower, scale in (
                ("256m-video", (30, 576, 9, 3, 1536), (12, 768, 3072, 12, 512, 16), 4),
                ("500m-video", (32, 960, 15, 5, 2560), (12, 768, 3072, 12, 512, 16), 4),
                ("2.2b", (24, 2048, 32, 32, 8192), (27, 1152, 4304, 16, 384, 14), 3),
            )
        }

    def settings(
        self, config: Json, processor: Json, *, max_tokens: int | None, tokens: Mapping[str, int]
    ) -> ImageSettings:
        """See `VisionSpec`."""
        vision, merge = config["vision_config"], config.get("scale_factor", 2)
        placeholder = token_text(tokens, config["image_token_id"], "image_token_id")
        require_tokens(tokens, _AROUND, _GLOBAL)
        largest: Json = setting(processor, "max_image_size", {})
        edge = tile_edge(vision, largest.get("longest_edge"), "tiles")
        size: Json = setting(processor, "size", {})
        longest: int = size.get("longest_edge") or 4 * edge
        is_divided: bool = setting(processor, "do_image_splitting", True)
        tile_tokens = (edge // vision["patch_size"] // merge) ** 2
        if max_tokens is not None:
            if max_tokens < tile_tokens:
                raise ValueError(f"makes at least {tile_tokens} tokens of every image")
            if is_divided:
                # An image of `side` x `side` tiles has as many, and that of the whole; of one tile,
                # no other.
                side = math.isqrt(max(max_tokens // tile_tokens - 1, 1))
                longest = min(longest, side * edge)
        return ImageSettings(
            family=self.model_type,
            patch_size=vision["patch_size"],
            merge_size=merge,
            edge=edge,
            longest_edge=longest,
            is_divided=is_divided,
            resample=setting(processor, "resample", LANCZOS),
            mean=three(setting(processor, "image_mean", (0.5, 0.5, 0.5))),
            std=three(setting(processor, "image_std", (0.5, 0.5, 0.5))),
            mark=placeholder,
            bare=placeholder,
            placeholder=placeholder,
            placeholder_id=config["image_token_id"],
            words=(_AROUND, _GLOBAL),
        )

    def layout(self, settings: ImageSettings, height: int, width: int) -> ImageLayout:
        """See `VisionSpec`."""
        around, whole = settings.words
        side = settings.edge // settings.patch_size // settings.merge_size
        tile = Tile(
            height=settings.edge,
            width=settings.edge,
            num_tokens=side * side,
            shape=(1, side, side),
        )
        pads = settings.placeholder * tile.num_tokens
        _, (tall, wide) = _sizes(settings, height, width)
        rows, columns = tall // settings.edge, wide // settings.edge
        if rows * columns == 1:
            return ImageLayout(tiles=(tile,), text=f"{around}{whole}{pads}{around}")
        text = "".join(
            "".join(f"{around}<row_{r + 1}_col_{c + 1}>{pads}" for c in range(columns)) + "\n"
            for r in range(rows)
        )
        return ImageLayout(
            tiles=(tile,) * (rows * columns + 1),
            text=f"{text}\n{around}{whole}{pads}{around}",
            rows=rows,
            columns=columns,
        )

    def tiles(
        self, settings: ImageSettings, image: Image, layout: ImageLayout
    ) -> list[NDArray[np.uint8]]:
        """See `VisionSpec`. The processor resizes several times, and so does this."""
        from PIL.Image import fromarray

        edge = settings.edge
        first, second = _sizes(settings, image.height, image.width)
        once = fromarray(pixels_of(image, first, settings.resample))
        pixels = pixels_of(once, second, settings.resample)
        if not layout.rows:
            return [pixels]
        # Copies, since a view of one tile would keep the pixels of all in memory.
        parts = [
            pixels[r * edge : (r + 1) * edge, c * edge : (c + 1) * edge].copy()
            for r in range(layout.rows)
            for c in range(layout.columns)
        ]
        return [*parts, pixels_of(fromarray(pixels), (edge, edge), settings.resample)]

    def tower_cost(self, config: Json) -> TowerCost:
        """See `VisionSpec`."""
        vision, width = config["vision_config"], config["text_config"]["hidden_size"]
        merge = config.get("scale_factor", 2) ** 2
        projection = vision["hidden_size"] * merge * width
        return siglip_cost(
            vision,
            projection=projection,
            projection_flops=2.0 * projection / merge,
            patches_per_token=merge,
        )


def _sizes(
    settings: ImageSettings, height: int, width: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Height and width after the first resize, to the longest edge, and after the second, to whole
    tiles, or to one."""
    longest, edge = settings.longest_edge, settings.edge
    ratio = width / height
    if width >= height:
        wide = longest
        tall = int(wide / ratio)
        tall += tall % 2
    else:
        tall = longest
        wide = int(tall * ratio)
        wide += wide % 2
    tall, wide = max(tall, 1), max(wide, 1)
    if wide >= tall and wide > MAX_EDGE:
        tall, wide = max(int(MAX_EDGE / (wide / tall)), 1), MAX_EDGE
    elif tall > wide and tall > MAX_EDGE:
        tall, wide = MAX_EDGE, max(int(MAX_EDGE * (wide / tall)), 1)
    if not settings.is_divided:
        return (tall, wide), (edge, edge)
    ratio = wide / tall
    if wide >= tall:
        full_wide = math.ceil(wide / edge) * edge
        full_tall = math.ceil(int(full_wide / ratio) / edge) * edge
    else:
        full_tall = math.ceil(tall / edge) * edge
        full_wide = math.ceil(int(full_tall * ratio) / edge) * edge
    return (tall, wide), (full_tall, full_wide)


def _config(
    numbers: tuple[int, int, int, int, int],
    tower: tuple[int, int, int, int, int, int],
    scale: int,
) -> Json:
    num_layers, hidden, heads, kv_heads, inner = numbers
    depth, width, tower_inner, tower_heads, image_size, patch = tower
    return {
        "model_type": "smolvlm",
        "image_token_id": 49_190,
        "scale_factor": scale,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "llama",
            "num_hidden_layers": num_layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 64,
            "intermediate_size": inner,
            "vocab_size": 49_280,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
        },
        "vision_config": {
            "model_type": "smolvlm_vision",
            "num_hidden_layers": depth,
            "hidden_size": width,
            "intermediate_size": tower_inner,
            "num_attention_heads": tower_heads,
            "image_size": image_size,
            "patch_size": patch,
        },
    }


SPEC = SmolVision()
