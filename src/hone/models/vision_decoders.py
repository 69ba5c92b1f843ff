"""Decoders of vision-language families that transformers has only inside of the whole model.

`hone.models.load` builds them from the decoder's part of a configuration, as
`AutoModelForCausalLM` and `AutoModelForSequenceClassification` build other decoders.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLTextConfig,
    Qwen3VLTextConfig,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3

__all__ = ["Qwen3VLDecoder", "Qwen25VLDecoder", "own_class"]


class Qwen25VLDecoder(qwen2_5.Qwen2_5_VLPreTrainedModel, GenerationMixin):
    """The language model of a Qwen2.5-VL with its head."""

    config_class = Qwen2_5_VLTextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012  as in transformers

    def __init__(self, config: Qwen2_5_VLTextConfig) -> None:
        super().__init__(config)
        self.model: Any = qwen2_5.Qwen2_5_VLTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class Qwen3VLDecoder(qwen3.Qwen3VLPreTrainedModel, GenerationMixin):
    """The language model of a Qwen3-VL with its head."""

    config_class = Qwen3VLTextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012  as in transformers

    def __init__(self, config: Qwen3VLTextConfig) -> None:
        super().__init__(config)
        self.model: Any = qwen3.Qwen3VLTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class Qwen25VLValueModel(GenericForSequenceClassification, qwen2_5.Qwen2_5_VLPreTrainedModel):
    """The language model of a Qwen2.5-VL with a head for scores."""

    config_class = Qwen2_5_VLTextConfig


class Qwen3VLValueModel(GenericForSequenceClassification, qwen3.Qwen3VLPreTrainedModel):
    """The language model of a Qwen3-VL with a head for scores."""

    config_class = Qwen3VLTextConfig


def own_class(auto: Any, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class that one of transformers' auto classes would build for the configuration of a
    decoder. None: it knows the class itself. (`auto.register` takes no configuration of
    transformers' own before version 5.19.)"""
    return _CLASSES.get((auto, type(config)))


_CLASSES: dict[tuple[Any, type[PreTrainedConfig]], type[PreTrainedModel]] = {
    (AutoModelForCausalLM, Qwen2_5_VLTextConfig): Qwen25VLDecoder,
    (AutoModelForCausalLM, Qwen3VLTextConfig): Qwen3VLDecoder,
    (AutoModelForSequenceClassification, Qwen2_5_VLTextConfig): Qwen25VLValueModel,
    (AutoModelForSequenceClassification, Qwen3VLTextConfig): Qwen3VLValueModel,
}
