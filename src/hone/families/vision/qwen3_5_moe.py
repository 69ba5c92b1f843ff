"""Qwen3.5 with experts in its decoder; the tower is that of the dense models."""

from __future__ import annotations

from typing import ClassVar

from hone.families import qwen3_5_moe_text
from hone.families.spec import Json
from hone.families.vision.qwen3_5 import LARGE_TOWER, Qwen35Vision

__all__ = ["SPEC"]


class Qwen35MoeVision(Qwen35Vision):
    """See `VisionSpec`."""

    model_type = "qwen3_5_moe"
    defaults: ClassVar[Json] = {"text_config": {"model_type": "qwen3_5_moe_text"}}

    @property
    def public(self) -> dict[str, Json]:
        """See `VisionSpec`."""
        return {
            name: self.whole_config(text, LARGE_TOWER)
            for name, text in qwen3_5_moe_text.SPEC.public.items()
        }


SPEC = Qwen35MoeVision()
