"""The vision-language families, by the `model_type` of the whole model. Each is imported when it is
asked for, so that a text model loads none of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from hone.families.spec import Json

if TYPE_CHECKING:
    from hone.families.vision.spec import VisionSpec

__all__ = [
    "VISION",
    "VISION_FIELD",
    "complete_config",
    "decoder_config",
    "unserved_family",
]


class _Families(Mapping[str, "VisionSpec"]):
    """The specs by the names of their files."""

    _names = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe", "gemma3", "smolvlm")

    def __getitem__(self, name: str) -> VisionSpec:
        if name not in self._names:
            raise KeyError(name)
        return import_module(f"hone.families.vision.{name}").SPEC

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


VISION: Mapping[str, VisionSpec] = _Families()

_SHARED = (
    "tie_word_embeddings",
    "architectures",
    "num_labels",
    "id2label",
    "quantization_config",
)
"""Fields of a whole model that say something of its decoder."""
_OUTSIDE = ("model_type", "text_config", "vision_config")
_UNSERVED = {
    r"qwen3-vl-.*-a\d": "qwen3_vl_moe",
    r"qwen2-vl": "qwen2_vl",
    r"qwen3\.8-.*next": "qwen4_exp",
    r"qwen.*-omni": "qwen_omni",
    r"llava-onevision": "llava_onevision",
    r"llava-v?1\.6|llava-next|granite-vision": "llava_next",
    r"llava": "llava",
    r"internvl": "internvl",
    r"smolvlm-|idefics": "idefics3",
    r"pixtral": "pixtral",
    r"mistral-small-3\.[1-9]|ministral-3": "mistral3",
    r"llama-3\.2-\d+b-vision": "mllama",
    r"llama-4": "llama4",
    r"gemma-3n": "gemma3n",
    r"gemma-4": "gemma4",
    r"paligemma": "paligemma",
    r"phi-3.*-vision": "phi3_v",
    r"phi-4-multimodal": "phi4_multimodal",
    r"glm-4\.\dv": "glm4v",
    r"minicpm-(v|o)": "minicpmv",
    r"deepseek-vl": "deepseek_vl",
    r"kimi-vl": "kimi_vl",
    r"molmo": "molmo",
    r"aya-vision": "aya_vision",
}
"""Families that are not served, by a pattern of their models' names in lower case."""

VISION_FIELD = "vision_family"
"""Field of a decoder's configuration with the `model_type` of the whole model that it is a part of.
"""


def complete_config(config: Json) -> Json:
    """A `config.json` of one of the families, with the fields that older and shorter files leave
    out. Any other is returned unchanged."""
    spec = VISION.get(str(config.get("model_type")))
    if spec is None:
        return config
    # Older files have the decoder's fields next to the tower's part.
    flat = {name: value for name, value in config.items() if name not in _OUTSIDE}
    parts = {"text_config": config.get("text_config") or flat}
    parts["vision_config"] = config.get("vision_config") or {}
    filled = {name: {**spec.defaults.get(name, {}), **own} for name, own in parts.items()}
    return {**spec.defaults, **config, **filled}


def decoder_config(config: Json) -> Json:
    """The decoder's part of a whole model's `config.json`, with the fields that are outside of it.
    Any other `config.json` is returned unchanged."""
    whole = complete_config(config)
    if whole is config:
        return config
    outer = {name: whole[name] for name in _SHARED if name in whole}
    return {**whole["text_config"], **outer, VISION_FIELD: whole["model_type"]}


def unserved_family(name: str) -> str | None:
    """The vision-language family of a public model that is not served, by the model's name without
    its owner; None where the name says nothing."""
    return next((family for pattern, family in _UNSERVED.items() if re.search(pattern, name)), None)
