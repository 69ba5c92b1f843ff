"""The model behind a door, of `hone serve` and of programs that play episodes."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from hone.config.tree import EvaluateDataConfig
from hone.door.calls import calls_reader
from hone.door.door import ServedModel
from hone.door.prompts import Prompts
from hone.models.load import load_config, load_end_ids
from hone.models.settings import ModelConfig
from hone.models.support import context_length
from hone.models.tokenizer import decoder
from hone.types import SamplingParams

__all__ = ["serve_model"]


def serve_model(
    cfg: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    defaults: SamplingParams,
    max_model_len: int | None,
) -> tuple[ServedModel, Prompts]:
    """The model of `cfg` under a name, and what makes ids of prompts for it. No path is longer than
    `max_model_len` tokens, nor than the model's context. `defaults` are the sampling parameters of
    a request that does not say otherwise."""
    config, end_ids = load_config(cfg), load_end_ids(cfg, tokenizer)
    longest = context_length(config)
    read_calls, unread = calls_reader(str(tokenizer.chat_template or ""))
    model = ServedModel(
        name=name,
        decode=decoder(tokenizer, end_ids),
        token_text=lambda token: str(tokenizer.decode([token])),
        defaults=defaults,
        read_calls=read_calls,
        unread_calls=unread,
    )
    prompts = Prompts(
        tokenizer,
        EvaluateDataConfig(),
        vocab_size=config.vocab_size,
        max_model_len=min(max_model_len or longest, longest),
        end_ids=end_ids,
    )
    return model, prompts
