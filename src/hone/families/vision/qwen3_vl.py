"""Qwen3-VL: a decoder of Qwen3's layers with positions of three axes, whose first layers get
further features of the tower (DeepStack, arXiv:2406.04334)."""

from __future__ import annotations

from typing import ClassVar

from hone.families.spec import Json
from hone.families.vision.qwen_vl import QwenVision
from hone.families.vision.spec import TowerCost, work_values

__all__ = ["SPEC", "Qwen3Vision"]


class Qwen3Vision(QwenVision):
    """See `VisionSpec`."""

    model_type = "qwen3_vl"
    defaults: ClassVar[Json] = {"text_config": {"model_type": "qwen3_vl_text"}}
    patch_size = 16
    mean = (0.5, 0.5, 0.5)
    std = (0.5, 0.5, 0.5)
    deepstack: tuple[int, ...] = (8, 16, 24)
    """Layers of the tower whose features the decoder gets too, if the configuration does not say.
    """

    @property
    def public(self) -> dict[str, Json]:
        """See `VisionSpec`."""
        small, large = (24, 1024, 4096, [5, 11, 17]), (27, 1152, 4304, [8, 16, 24])
        return {
            f"qwen3-vl-{name}": _config(numbers, tower, tied=tied)
            for name, tied, numbers, tower in (
                ("2b", True, (28, 2048, 16, 8, 6144), small),
                ("4b", True, (36, 2560, 32, 8, 9728), small),
                ("8b", False, (36, 4096, 32, 8, 12_288), large),
                ("32b", False, (64, 5120, 64, 8, 25_600), large),
            )
        }

    def tower_cost(self, config: Json) -> TowerCost:
        """See `VisionSpec`."""
        vision = config["vision_config"]
        hidden, inner = vision["hidden_size"], vision["intermediate_size"]
        depth, out = vision["depth"], vision["out_hidden_size"]
        merge = vision.get("spatial_merge_size", 2) ** 2
        patch = vision.get("patch_size", 16)
        embed = 3 * vision.get("temporal_patch_size", 2) * patch**2 * hidden
        positions = vision.get("num_position_embeddings", 2304) * hidden
        products = 4 * hidden**2 + 2 * hidden * inner
        small = 4 * hidden + 3 * hidden + hidden + inner + hidden
        wide = merge * hidden
        product = wide**2 + wide * out
        biases = wide + out
        deep = len(vision.get("deepstack_visual_indexes", self.deepstack))
        mergers = (1 + deep) * (product + biases) + 2 * hidden + deep * 2 * wide
        return TowerCost(
            num_params=embed + hidden + positions + depth * (products + small) + mergers,
            flops_per_patch=2.0 * (embed + depth * products + (1 + deep) * product / merge),
            attention_flops_per_pair=4.0 * hidden * depth,
            patches_per_token=merge,
            features_per_token=1 + deep,
            values_per_patch=work_values(pixels=embed // hidden, hidden=hidden, inner=inner),
        )


def _config(
    numbers: tuple[int, int, int, int, int], tower: tuple[int, int, int, list[int]], *, tied: bool
) -> Json:
    num_layers, hidden, heads, kv_heads, inner = numbers
    depth, width, tower_inner, deepstack = tower
    return {
        "model_type": "qwen3_vl",
        "image_token_id": 151_655,
        "vision_start_token_id": 151_652,
        "vision_end_token_id": 151_653,
        "tie_word_embeddings": tied,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "num_hidden_layers": num_layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 128,
            "intermediate_size": inner,
            "vocab_size": 151_936,
            "max_position_embeddings": 262_144,
            "tie_word_embeddings": tied,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5_000_000,
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "model_type": "qwen3_vl_vision",
            "depth": depth,
            "hidden_size": width,
            "intermediate_size": tower_inner,
            "num_heads": 16,
            "out_hidden_size": hidden,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": deepstack,
        },
    }


SPEC = Qwen3Vision()
