"""Gemma 3 with images: each is one square of 256 tokens, which attend to each other in both
directions."""

from __future__ import annotations

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

BILINEAR = 2
_TOKENS = 256


class Gemma3Vision:
    """See `VisionSpec`. Crops of wide images ("pan and scan"), which the processor makes only if
    asked, are not made."""

    model_type = "gemma3"
    inputs = InputSpec(kinds=frozenset({"image"}), attends_within=True)
    decoder_prefix = "model.language_model."
    tower_prefixes = ("model.vision_tower.", "model.multi_modal_projector.")
    defaults: ClassVar[Json] = {
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "gemma3_text",
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
        },
    }

    @property
    def public(self) -> dict[str, Json]:
        """See `VisionSpec`."""
        return {
            f"gemma-3-{name}": _config(numbers)
            for name, numbers in (
                ("4b", (34, 2560, 8, 4, 10_240, 256)),
                ("12b", (48, 3840, 16, 8, 15_360, 256)),
                ("27b", (62, 5376, 32, 16, 21_504, 128)),
            )
        }

    def settings(
        self, config: Json, processor: Json, *, max_tokens: int | None, tokens: Mapping[str, int]
    ) -> ImageSettings:
        """See `VisionSpec`."""
        num_tokens: int = config.get("mm_tokens_per_image", _TOKENS)
        if max_tokens is not None and max_tokens < num_tokens:
            raise ValueError(f"makes {num_tokens} tokens of every image, whatever its size")
        if setting(processor, "do_pan_and_scan", False):
            raise ValueError(
                "has do_pan_and_scan in its processor's settings, and crops are not made here"
            )
        vision = config["vision_config"]
        placeholder_id: int = config.get("image_token_id") or config["image_token_index"]
        start, end = (
            token_text(tokens, config[name], name)
            for name in ("boi_token_index", "eoi_token_index")
        )
        size: Json = setting(processor, "size", {})
        edge = tile_edge(vision, size.get("height"), "images")
        return ImageSettings(
            family=self.model_type,
            patch_size=vision["patch_size"],
            merge_size=round((edge // vision["patch_size"]) / num_tokens**0.5),
            edge=edge,
            resample=setting(processor, "resample", BILINEAR),
            mean=three(setting(processor, "image_mean", (0.5, 0.5, 0.5))),
            std=three(setting(processor, "image_std", (0.5, 0.5, 0.5))),
            mark=start,
            bare=start,
            placeholder=token_text(tokens, placeholder_id, "image_token_id"),
            placeholder_id=placeholder_id,
            words=(end,),
        )

    def layout(self, settings: ImageSettings, height: int, width: int) -> ImageLayout:
        """See `VisionSpec`."""
        side = settings.edge // settings.patch_size // settings.merge_size
        tile = Tile(
            height=settings.edge,
            width=settings.edge,
            num_tokens=side * side,
            shape=(1, side, side),
        )
        (end,) = settings.words
        pads = settings.placeholder * tile.num_tokens
        return ImageLayout(tiles=(tile,), text=f"\n\n{settings.mark}{pads}{end}\n\n")

    def tiles(
        self, settings: ImageSettings, image: Image, layout: ImageLayout
    ) -> list[NDArray[np.uint8]]:
        """See `VisionSpec`."""
        return [pixels_of(image, (settings.edge, settings.edge), settings.resample)]

    def tower_cost(self, config: Json) -> TowerCost:
        """See `VisionSpec`."""
        vision, width = config["vision_config"], config["text_config"]["hidden_size"]
        hidden = vision["hidden_size"]
        num_patches = (vision["image_size"] // vision["patch_size"]) ** 2
        num_tokens = config.get("mm_tokens_per_image", _TOKENS)
        return siglip_cost(
            vision,
            projection=hidden * width + hidden,
            projection_flops=2.0 * hidden * width * num_tokens / num_patches,
            patches_per_token=num_patches // num_tokens,
            tokens_per_image=num_tokens,
        )


def _config(numbers: tuple[int, int, int, int, int, int]) -> Json:
    num_layers, hidden, heads, kv_heads, inner, head_dim = numbers
    return {
        "model_type": "gemma3",
        "image_token_id": 262_144,
        "boi_token_index": 255_999,
        "eoi_token_index": 256_000,
        "mm_tokens_per_image": 256,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "gemma3_text",
            "num_hidden_layers": num_layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "intermediate_size": inner,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "sliding_window": 1024,
            "tie_word_embeddings": True,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 896,
            "patch_size": 14,
            "vision_use_head": False,
        },
    }


SPEC = Gemma3Vision()
