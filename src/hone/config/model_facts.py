"""The few numbers of a model that configuration checks need, from its `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

__all__ = ["DIVIDED_FIELDS", "ModelFacts"]

DIVIDED_FIELDS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Numbers of `config.json` of which each of the devices that share a model has its part."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Limits and sizes of a decoder; None where its `config.json` does not say."""

    context_length: int | None
    """Positions the model was made for."""
    vocab_size: int | None
    kv_values_per_token: int | None
    """Numbers that one token adds to the KV cache, over all layers."""
    family: str | None
    """`model_type`."""
    divided: Mapping[str, int]
    """What tensor parallelism divides among devices, by key."""

    @classmethod
    def read(cls, model_path: str) -> Self | None:
        """The facts of a local model folder; None for a hub name or an unreadable file."""
        try:
            config: Any = json.loads((Path(model_path) / "config.json").read_text())
        except (OSError, ValueError):
            return None
        if not isinstance(config, dict):
            return None
        config = config.get("text_config", config)
        return cls(
            context_length=config.get("max_position_embeddings"),
            vocab_size=config.get("vocab_size"),
            kv_values_per_token=_kv_values_per_token(config),
            family=config.get("model_type"),
            divided={key: config[key] for key in DIVIDED_FIELDS if config.get(key)},
        )

    def kv_bytes_per_token(self, dtype: str) -> int | None:
        """Bytes of one token in the KV cache when it is held in `dtype`."""
        values = self.kv_values_per_token
        return None if values is None else values * {"float32": 4, "fp8": 1}.get(dtype, 2)


def _kv_values_per_token(config: dict[str, Any]) -> int | None:
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    hidden = config.get("hidden_size")
    if not layers or not heads or not hidden:
        return None
    head_dim = config.get("head_dim") or hidden // heads
    return 2 * layers * (config.get("num_key_value_heads") or heads) * head_dim
