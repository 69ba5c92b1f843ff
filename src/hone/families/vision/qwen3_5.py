"""Qwen3.5: a hybrid decoder with positions of three axes, and the tower of Qwen3-VL without
DeepStack. All published models of the family are whole ones, also those that are used for text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from hone.families import qwen3_5_text
from hone.families.spec import Json
from hone.families.vision.qwen3_vl import Qwen3Vision

__all__ = ["LARGE_TOWER", "SPEC", "Qwen35Vision", "TowerSizes"]

TowerSizes = tuple[int, int, int, int]
"""Layers, hidden size, intermediate size and heads of a tower."""

LARGE_TOWER: TowerSizes = (27, 1152, 4304, 16)
_TOWERS: Mapping[str, TowerSizes] = {
    "qwen3.5-0.8b": (12, 768, 3072, 12),
    "qwen3.5-2b": (24, 1024, 4096, 16),
    "qwen3.5-4b": (24, 1024, 4096, 16),
}
"""Towers of the small public models; all others have the large one."""


class Qwen35Vision(Qwen3Vision):
    """See `VisionSpec`."""

    model_type = "qwen3_5"
    defaults: ClassVar[Json] = {"text_config": {"model_type": "qwen3_5_text"}}
    deepstack = ()

    @property
    def public(self) -> dict[str, Json]:
        """See `VisionSpec`."""
        return {
            name: self.whole_config(text, _TOWERS.get(name, LARGE_TOWER))
            for name, text in qwen3_5_text.SPEC.public.items()
        }

    def whole_config(self, text: Json, tower: TowerSizes) -> Json:
        """The `config.json` of a public model with the decoder `text`."""
        depth, width, inner, heads = tower
        return {
            "model_type": self.model_type,
            "image_token_id": 248_056,
            "vision_start_token_id": 248_053,
            "vision_end_token_id": 248_054,
            "tie_word_embeddings": text["tie_word_embeddings"],
            "text_config": text,
            "vision_config": {
                "model_type": f"{self.model_type}_vision",
                "depth": depth,
                "hidden_size": width,
                "intermediate_size": inner,
                "num_heads": heads,
                "out_hidden_size": text["hidden_size"],
                "patch_size": 16,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "num_position_embeddings": 2304,
            },
        }


SPEC = Qwen35Vision()
