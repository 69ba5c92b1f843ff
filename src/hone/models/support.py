"""Properties that a model declares: support, end tokens, context length."""

from __future__ import annotations

from collections.abc import Collection

from jinja2 import TemplateError
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hone.errors import UserError
from hone.families.registry import SERVED, unserved

__all__ = [
    "check_supported",
    "classifies",
    "context_length",
    "declared_eos_ids",
    "eos_token_ids",
    "head_dim_of",
    "silent_token_ids",
]

_SAID = "what the assistant has said"


def check_supported(config: PreTrainedConfig) -> None:
    """Raise UserError unless training and generation compute exactly what `config` describes."""
    if values := ", ".join(unserved(config.to_dict())):
        raise UserError(
            f"a model of the family {config.model_type} with {values} in its config.json is not "
            f"served: {SERVED}"
        )


def classifies(config: PreTrainedConfig) -> bool:
    """Whether a model classifies, or scores with one label, instead of predicting tokens."""
    return any("SequenceClassification" in name for name in config.architectures or ())


def context_length(config: PreTrainedConfig) -> int:
    """Longest sequence, prompt plus completion, that the model's positions are made for."""
    return int(config.max_position_embeddings)


def head_dim_of(config: PreTrainedConfig) -> int:
    """Size of an attention head. If a config names none, hidden size / heads."""
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def eos_token_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[int, ...]:
    """Every token id that ends an answer of a loaded model, ascending: from its generation config,
    its config and its tokenizer. `hone.models.load.load_end_ids` gives them before a model is
    loaded."""
    return declared_eos_ids(getattr(model, "generation_config", None), model.config, tokenizer)


def declared_eos_ids(*places: object) -> tuple[int, ...]:
    """Every id that ends a turn, ascending.

    Checkpoints declare them in up to three places that often disagree: `generation_config.json`
    (several ids), `config.json` and the tokenizer. Sampling ends at any of them, and so does what a
    demonstration trains.
    """
    ids: set[int] = set()
    for place in places:
        declared = getattr(place, "eos_token_id", None)
        if declared is not None:
            ids.update(declared if isinstance(declared, list | tuple) else [declared])
    return tuple(sorted(ids))


def silent_token_ids(
    end_ids: Collection[int], tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """Ids that are not part of a completion's text: `end_ids`, the padding, and the token with
    which the chat template ends a turn. All others are text, special or not: marks of thoughts and
    tool calls have a meaning."""
    padding = tokenizer.pad_token_id
    paddings = [padding] if isinstance(padding, int) else []
    return frozenset((*end_ids, *paddings, *_template_end_ids(tokenizer)))


def _template_end_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special token that the chat template writes after an assistant's message.

    A model may be trained to write it although no file declares it, as base models with a ChatML
    template: sampling would continue after it to the end token. Empty without a template, and for
    one that refuses a plain question with its answer.
    """
    if tokenizer.chat_template is None:
        return []
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except (TemplateError, TypeError, ValueError):
        return []
    assert isinstance(text, str)
    behind = text.partition(_SAID)[2].lstrip()
    tokens = tokenizer.added_tokens_decoder.items()
    return [i for i, token in tokens if token.special and behind.startswith(token.content)]
