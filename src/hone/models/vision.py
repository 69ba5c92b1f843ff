"""Loads the two parts of a vision-language model: its decoder, and its tower.

A checkpoint holds both under the names of the whole model of transformers. The decoder is loaded
as a text model by `hone.models.load`; this module gives it the whole model's files, and loads the
tower alone. Whatever transformers converts in older checkpoints it converts here too: each part is
the whole class without the other part's modules.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from hone.families.vision.registry import VISION, VISION_FIELD
from hone.models.towers import TOWERS, Tower

__all__ = [
    "decoder_of",
    "draw_tower",
    "language_model_of",
    "text_config_of",
    "tower_of",
    "whole_class",
    "whole_options",
]

VISION_ATTENTION = "sdpa"
"""Attention of towers, which is transformers' own."""


def text_config_of(whole: PreTrainedConfig) -> PreTrainedConfig:
    """The decoder's configuration, with the fields that the whole model has outside of it, and the
    name of the whole model's family."""
    from hone.models.vision_decoders import register_decoders

    register_decoders()
    text = whole.get_text_config()
    text.tie_word_embeddings = whole.tie_word_embeddings
    setattr(text, VISION_FIELD, whole.model_type)
    return text


def whole_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a text model for a whole model, whose tower keeps attention of its own."""
    attention = {"text_config": options["attn_implementation"], "vision_config": VISION_ATTENTION}
    return {**options, "attn_implementation": attention}


def whole_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class of transformers for a whole model."""
    return cast("type[PreTrainedModel]", MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)])


def language_model_of(whole: Any) -> Any:
    """The decoder's backbone in a whole model."""
    return getattr(whole.model, _part(whole.config))


def _part(config: PreTrainedConfig) -> str:
    return VISION[config.model_type].decoder_prefix.split(".")[1]


def decoder_of(whole: Any, decoder: Any) -> PreTrainedModel:
    """Put the weights of a whole model's language model and head into `decoder`, which has none."""
    decoder.model = language_model_of(whole)
    decoder.lm_head = whole.lm_head
    return decoder


def tower_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The whole model's class without the modules of its decoder."""
    base = whole_class(config)
    part = _part(config)

    def __init__(self: Any, config: PreTrainedConfig) -> None:
        with torch.device("meta"):
            base.__init__(self, config)
        setattr(self.model, part, nn.Identity())
        self.lm_head = nn.Identity()

    return type(
        f"{base.__name__}Tower",
        (base,),
        {
            "__init__": __init__,
            "_tied_weights_keys": None,
            "_keys_to_ignore_on_load_unexpected": [part, r"lm_head"],
            "tie_weights": lambda self, *args, **kwargs: None,
            "get_input_embeddings": lambda self: None,
            "get_output_embeddings": lambda self: None,
        },
    )


def tower_of(
    place: str, config: PreTrainedConfig, *, dtype: torch.dtype, device: torch.device
) -> Tower:
    """The tower of a checkpoint."""
    loaded: Any = tower_class(config).from_pretrained(
        place,
        config=config,
        dtype=dtype,
        attn_implementation=VISION_ATTENTION,
        output_loading_info=True,
    )
    whole, info = loaded
    if info["missing_keys"]:
        from hone.models.weight_files import lacking

        raise lacking(place, sorted(info["missing_keys"]))
    tower = TOWERS[config.model_type](whole)
    tower.modules.to(device)
    return tower


def draw_tower(
    config: PreTrainedConfig, *, seed: int, dtype: torch.dtype, device: torch.device
) -> Tower:
    """A tower with random weights of a seed."""
    kind = tower_class(config)
    with torch.device("meta"):
        whole: Any = kind._from_config(  # pyright: ignore[reportPrivateUsage]
            config, dtype=dtype, attn_implementation=VISION_ATTENTION
        )
    tower = TOWERS[config.model_type](whole)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(seed)
        for module in tower.modules.modules():
            module.to_empty(device=device, recurse=False)
        for module in tower.modules.modules():
            whole._init_weights(module)
    return tower
