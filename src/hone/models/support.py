"""What a model declares about itself: whether it is served, how it ends, how far it reaches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hone.config.errors import UserError
from hone.families.registry import SPECS

__all__ = ["check_supported", "context_length", "eos_token_ids"]

LAYER_TYPES = ("full_attention", "sliding_attention")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings of a token's position alone. `dynamic` and `longrope` also depend on the
longest sequence of the batch, so a packed sample would not equal the same sample alone."""


def check_supported(config: PreTrainedConfig) -> None:
    """Raise UserError unless training and generation compute exactly what `config` describes."""
    family = config.model_type
    spec = SPECS.get(family)
    if spec is None:
        vision = hasattr(config, "vision_config") or "_vl" in family
        hint = " (it reads images; only text models are served)" if vision else ""
        raise UserError(
            f"model family {family!r} is not supported{hint}; supported: {', '.join(SPECS)}"
        )
    refused = [name for name in spec.unserved_fields if getattr(config, name, None)]
    if refused:
        values = ", ".join(f"{name}={getattr(config, name)!r}" for name in refused)
        raise UserError(f"this {family} model's config.json asks for what is not served: {values}")
    _check_names("layer_types", getattr(config, "layer_types", None) or (), LAYER_TYPES)
    _check_names("rope_type", _rope_types(config), ROPE_TYPES)


def context_length(config: PreTrainedConfig) -> int:
    """Longest sequence, prompt plus completion, that the model's positions are made for."""
    return int(config.max_position_embeddings)


def eos_token_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[int, ...]:
    """Every id that ends a sequence, ascending.

    Checkpoints declare them in up to three places that often disagree: `generation_config.json`
    (several ids), `config.json` and the tokenizer. A completion ends at any of them.
    """
    ids: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        declared = getattr(source, "eos_token_id", None)
        if declared is not None:
            ids.update(declared if isinstance(declared, list | tuple) else [declared])
    return tuple(sorted(ids))


def _check_names(field: str, found: Iterable[str], served: tuple[str, ...]) -> None:
    if unknown := sorted(set(found) - set(served)):
        raise UserError(f"{field} {unknown} is not served; served: {', '.join(served)}")


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """Rope types in use: one for the model, or one for each layer type."""
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    groups = [value for value in rope.values() if isinstance(value, Mapping)] or [rope]
    return {str(group.get("rope_type", "default")) for group in groups}
