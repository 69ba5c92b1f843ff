"""Prompts for reinforcement learning, evaluation and generation."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

from hone.config.data import DataConfig, SourceConfig
from hone.data.chat import Rendered, Renderer
from hone.data.columns import Example, map_rows
from hone.data.filters import FilterReport, LengthLimit, filter_length
from hone.data.sources import read_source
from hone.data.split import load_split
from hone.data.stream import Stream
from hone.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["PromptData", "PromptStream", "load_prompts"]

logger = logging.getLogger(__name__)

PromptStream: TypeAlias = Stream[Prompt]


@dataclass(frozen=True, slots=True)
class PromptData:
    """The prompts of a run."""

    train: PromptStream
    eval: list[Prompt]
    report: FilterReport

    def prompts(self) -> list[Prompt]:
        """All of them, those to train on first."""
        return [*chain(*self.train.sources), *self.eval]


def load_prompts(
    cfg: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    max_prompt_tokens: int | None = None,
) -> PromptData:
    """Read, render, filter and split the prompts of all sources.

    `max_prompt_tokens` is what the model's context leaves for a prompt; the lower of it and
    `data.max_prompt_tokens` counts. Raises UserError for anything wrong with the data.
    """
    renderer = Renderer(tokenizer, cfg)
    report = FilterReport()
    limit = LengthLimit("data.max_prompt_tokens", cfg.max_prompt_tokens, _num_tokens)
    if max_prompt_tokens is not None and max_prompt_tokens < cfg.max_prompt_tokens:
        limit = LengthLimit("the context's room for a prompt", max_prompt_tokens, _num_tokens)

    def load(source: SourceConfig, name: str) -> list[Prompt]:
        examples = map_rows(read_source(source), source, name=name)
        prompts = renderer.prompts(examples, max_tokens=limit.max_tokens)
        rows = list(zip(examples, prompts, strict=True))
        kept = filter_length(
            rows, {"max_prompt_tokens": limit}, overlong=cfg.overlong_prompts, report=report
        )
        return [_prompt(example, rendered) for example, rendered in kept]

    split = load_split(cfg, load, seed)
    logger.log(logging.WARNING if report.dropped else logging.INFO, "%s", report.summary())
    train = PromptStream(
        split.train,
        seed=seed,
        weights=[source.weight for source in cfg.train],
        shuffle=cfg.shuffle,
        content=lambda prompt: (prompt.id, prompt.token_ids, prompt.answer, prompt.task),
    )
    return PromptData(train, split.eval, report)


def _num_tokens(rendered: Rendered) -> int:
    return len(rendered.token_ids)


def _prompt(example: Example, rendered: Rendered) -> Prompt:
    return Prompt(
        id=example.id,
        token_ids=rendered.token_ids,
        text=rendered.text,
        answer=example.answer,
        task=example.task,
        metadata=example.metadata,
    )
