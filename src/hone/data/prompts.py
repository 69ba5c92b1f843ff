"""Prompts for reinforcement learning, evaluation and generation."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from hone.data.chat import Rendered, Renderer
from hone.data.columns import Example, ExampleReaders
from hone.data.filters import LengthLimit
from hone.data.loading import load_data
from hone.data.settings import CurriculumConfig, DataConfig
from hone.data.sources import shorten
from hone.data.split import Data
from hone.data.stream import Stream
from hone.data.tool_schemas import ToolSchemas
from hone.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hone.images.reader import ImageReader

__all__ = [
    "PromptData",
    "PromptStream",
    "is_put_into_template",
    "load_prompts",
    "make_prompt",
    "prompt_limit",
    "show_first",
    "show_template",
]

_log = logging.getLogger(__name__)

PromptStream: TypeAlias = Stream[Prompt]
PromptData: TypeAlias = Data[Prompt]


def load_prompts(
    cfg: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int = 0,
    max_prompt_tokens: int | None = None,
    keeps_messages: bool = False,
    tools: ToolSchemas = (),
    images: ImageReader | None = None,
    cache: Path | None = None,
    curriculum: CurriculumConfig | None = None,
) -> PromptData:
    """Read, render, filter and split the prompts of all sources. `train` is an endless stream in an
    order drawn from `seed`, `eval` a list.

    `max_prompt_tokens` is the room for a prompt in the model's context; the smaller of it and
    `data.max_prompt_tokens` is the limit. `keeps_messages`, `tools` and `images` are those of
    `Renderer`, `cache` is a folder for indexes of large sources. By `curriculum` prompts rest, as
    their rates are reported to `Stream.learn`.
    Raises UserError for anything wrong with the data.
    """
    renderer = Renderer(tokenizer, cfg, keeps_messages=keeps_messages, tools=tools, images=images)
    limit = prompt_limit(cfg, max_prompt_tokens)
    data = load_data(
        cfg,
        readers=ExampleReaders(),
        render=lambda examples: renderer.prompts(examples, max_tokens=limit.max_tokens),
        limits=[limit],
        make=make_prompt,
        content=_content,
        seed=seed,
        images=images,
        cache=cache,
    )
    if curriculum is not None and curriculum.pass_rate is not None:
        data.train.let_rest(curriculum)
    show_first(data.known_rows()[0], renderer, cfg)
    return data


def prompt_limit(cfg: DataConfig, max_prompt_tokens: int | None) -> LengthLimit[Rendered]:
    """The smaller of `data.max_prompt_tokens` and the room for a prompt in the model's context."""
    if max_prompt_tokens is not None and max_prompt_tokens < cfg.max_prompt_tokens:
        return LengthLimit("the context's room for a prompt", max_prompt_tokens, _num_tokens)
    return LengthLimit("data.max_prompt_tokens", cfg.max_prompt_tokens, _num_tokens)


def show_first(first: Prompt, renderer: Renderer, cfg: DataConfig) -> None:
    """Log the first prompt, where it is put into a chat template without being configured so."""
    if is_put_into_template(first.unrendered, renderer, cfg):
        show_template("prompts", first.text)


def is_put_into_template(prompt: object, renderer: Renderer, cfg: DataConfig) -> bool:
    """Whether a text prompt gets a chat template by default (`data.chat` auto). That is worth a log
    line, since models that were not trained on the template, such as base models, fail with it."""
    return renderer.uses_chat and cfg.chat == "auto" and isinstance(prompt, str)


def show_template(what: str, first: str) -> None:
    """Log that texts are put into the chat template, with the first one."""
    _log.info(
        "%s are put into the tokenizer's chat template (with data.chat=never they stay as they "
        "are); the first one: %s",
        what,
        shorten(repr(first)),
    )


def _content(prompt: Prompt) -> object:
    return prompt.id, prompt.token_ids, prompt.answer, prompt.task, *prompt.model_input.key


def _num_tokens(rendered: Rendered) -> int:
    return len(rendered.token_ids)


def make_prompt(example: Example, rendered: Rendered) -> Prompt:
    """The prompt of a row and its rendering."""
    return Prompt(
        id=example.id,
        token_ids=rendered.token_ids,
        text=rendered.text,
        answer=example.answer,
        task=example.task,
        metadata=example.metadata,
        unrendered=example.prompt,
        raw_answer=example.raw_answer,
        messages=rendered.messages,
        model_input=rendered.model_input,
    )
