"""The vision-language families, by the `model_type` of the whole model. Each is imported when it is
asked for, so that a text model loads none of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hone.families.spec import Json
from hone.model_input import TEXT_ONLY, InputSpec

if TYPE_CHECKING:
    from hone.families.vision.spec import VisionSpec

__all__ = ["VISION", "VISION_FIELD", "decoder_config", "inputs_of"]


class _Families(Mapping[str, "VisionSpec"]):
    """The specs by the names of their files."""

    _names = ("qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm")

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
