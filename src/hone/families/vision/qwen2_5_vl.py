"""Qwen2.5-VL: a decoder of Qwen2's layers with positions of three axes, windows in its tower."""

from __future__ import annotations

from typing import ClassVar

from hone.families.spec import Json
from hone.families.vision.qwen_vl import QwenVision
from hone.families.vision.spec import TowerCost, work_values

__all__ = ["SPEC"]


class Qwen25Vision(QwenVision):
    """See `VisionSpec`."""

    model_type = "qwen2_5_vl"
    defaults: ClassVar[Json] = {"text_config": {"model_type": "qwen2_5_vl_text"}}

    @property
    def public(self) -> dict[str, Json]:
        """See `VisionSpec`."""
        return {
            f"qwen2.5-vl-{name}": _config(numbers, tied=tied, vocab=vocab)
            for name, tied, vocab, numbers in (
                ("3b", True, 151_936, (36, 2048, 16, 2, 11_008)),
                ("7b", False, 152_064, (28, 3584, 28, 4, 18_944)),
                ("32b", False, 152_064, (64, 5120, 40, 8, 27_648)),
                ("72b", False, 152_064, (80, 8192, 64, 8, 29_568)),
            )
        }

    def tower_cost(self, config: Json) -> TowerCost:
        """See `VisionSpec`."""
        vision = config["vision_config"]
        hidden, inner = vision["hidden_size"], vision["intermediate_size"]
        depth, out = vision["depth"], vision["out_hidden_size"]
        merge = vision.get("spatial_merge_size", 2) ** 2
        patch = vision.get("patch_size", 14)
        embed = 3 * vision.get("temporal_patch_size", 2) * patch**2 * hidden
        products = 4 * hidden**2 + 3 * hidden * inner
        small = 2 * hidden + 3 * hidden + hidden + 2 * inner + hidden
        wide = merge * hidden
        merger = hidden + wide**2 + wide + wide * out + out
        full = vision.get("fullatt_block_indexes", (7, 15, 23, 31))
        window = vision.get("window_size", 112) // patch
        return TowerCost(
            num_params=embed + depth * (products + small) + merger,
            flops_per_patch=2.0 * (embed + depth * products + (wide**2 + wide * out) / merge),
            attention_flops_per_pair=4.0 * hidden * depth,
            patches_per_token=merge,
            window_patches=window**2,
            full_layers_share=len(full) / depth,
            values_per_patch=work_values(
                pixels=embed // hidden, hidden=hidden, inner=inner, is_gated=True
            ),
        )


def _config(numbers: tuple[int, int, int, int, int], *, tied: bool, vocab: int) -> Json:
    num_layers, hidden, heads, kv_heads, inner = numbers
    return {
        "model_type": "qwen2_5_vl",
        "image_token_id": 151_655,
        "vision_start_token_id": 151_652,
        "vision_end_token_id": 151_653,
        "tie_word_embeddings": tied,
        "text_config": {
            "model_type": "qwen2_5_vl_text",
            "num_hidden_layers": num_layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": inner,
            "vocab_size": vocab,
            "max_position_embeddings": 128_000,
            "tie_word_embeddings": tied,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1_000_000,
                "mrope_section": [16, 24, 24],
            },
        },
        "vision_config": {
            "model_type": "qwen2_5_vl_vision",
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420 if hidden < 5120 else 3456,
            "num_heads": 16,
            "out_hidden_size": hidden,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    }


SPEC = Qwen25Vision()
