"""The model behind a door, of `hone serve` and of programs that play episodes."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from hone.config.tree import EvaluateDataConfig
from hone.data.settings import DataConfig, ServedDataConfig
from hone.door.calls import calls_reader
from hone.door.door import ServedModel
from hone.door.images import RequestImages
from hone.door.prompts import Prompts
from hone.loops.inputs import image_reader
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
    data: DataConfig | ServedDataConfig,
) -> tuple[ServedModel, Prompts]:
    """The model of `cfg` under a name, and what makes ids of prompts for it. No path is longer than
    `max_model_len` tokens, nor than the model's context. `defaults` are the sampling parameters of
    a request that does not say otherwise, and `data` says how images are read."""
    config, end_ids = load_config(cfg), load_end_ids(cfg, tokenizer)
    longest = context_length(config)
    longest = min(max_model_len or longest, longest)
    reader = image_reader(cfg, data, tokenizer)
    images = None
    if reader is not None:
        num_threads = max(data.image_workers, 1)
        images = RequestImages(reader, max_model_len=longest, num_threads=num_threads)
    read_calls, unread = calls_reader(str(tokenizer.chat_template or ""))
    model = ServedModel(
        name=name,
        decode=decoder(tokenizer, end_ids),
        token_text=lambda token: str(tokenizer.decode([token])),
        defaults=defaults,
        read_calls=read_calls,
        unread_calls=unread,
        images=images,
    )
    prompts = Prompts(
        tokenizer,
        EvaluateDataConfig(),
        vocab_size=config.vocab_size,
        max_model_len=longest,
        end_ids=end_ids,
        images=reader,
    )
    return model, prompts
