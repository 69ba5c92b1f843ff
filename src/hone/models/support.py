"""What a model declares about itself: whether it is served, how it ends, how far it reaches."""

from __future__ import annotations

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hone.config.errors import UserError
from hone.families.registry import unserved

__all__ = ["check_supported", "classifies", "context_length", "eos_token_ids"]


def check_supported(config: PreTrainedConfig) -> None:
    """Raise UserError unless training and generation compute exactly what `config` describes."""
    if values := ", ".join(unserved(config.to_dict())):
        raise UserError(
            f"a model of the family {config.model_type} with {values} in its config.json is not "
            "served: hone runs dense decoders of text"
        )


def classifies(config: PreTrainedConfig) -> bool:
    """Whether a model tells classes apart, or with one label scores, in place of predicting."""
    return any("SequenceClassification" in name for name in config.architectures or ())


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
