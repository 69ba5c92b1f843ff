"""The vision-language families, by the `model_type` of the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hone.families.spec import Json
from hone.families.vision import gemma3, qwen2_5_vl, qwen3_vl, smolvlm
from hone.families.vision.spec import VisionSpec
from hone.model_input import TEXT_ONLY, InputSpec

__all__ = ["VISION", "VISION_FIELD", "decoder_config", "inputs_of"]

VISION: Mapping[str, VisionSpec] = {
    spec.model_type: spec for spec in (qwen2_5_vl.SPEC, qwen3_vl.SPEC, gemma3.SPEC, smolvlm.SPEC)
}

VISION_FIELD = "vision_family"
"""Field of a decoder's configuration with the `model_type` of the whole model that it is a part of.
"""


def inputs_of(config: Any) -> InputSpec:
    """What sequences of the model with this configuration of transformers may hold besides ids."""
    family = getattr(config, VISION_FIELD, None)
    return TEXT_ONLY if family is None else VISION[family].inputs


def decoder_config(config: Json) -> Json:
    """The decoder's part of a whole model's `config.json`, with the fields that are outside of it;
    any other `config.json` as it is."""
    if config.get("model_type") not in VISION:
        return config
    outer = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
    return {**config.get("text_config", {}), **outer, VISION_FIELD: config["model_type"]}
