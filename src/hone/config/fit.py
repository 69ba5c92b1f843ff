"""Lengths that nobody set are made to fit a model of a short context; those that were set stay.

cfg, notes = fit_to_context(cfg, context_length=64)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from hone.config.base import Section
from hone.config.tree import EvaluateConfig, GenerateConfig, RLConfig, SFTConfig

__all__ = ["fit_to_context"]

T = TypeVar("T", bound=Section)

_PROMPT = "data.max_prompt_tokens"


def fit_to_context(cfg: T, context_length: int | None) -> tuple[T, list[str]]:
    """The configuration with the lengths that a model of so many positions has room for, and what
    was chosen, in words. Where lengths that were set leave no room, nothing is changed: the rules
    say what is wrong."""
    if context_length is None:
        return cfg, []
    chosen = dict(_chosen(cfg, context_length))
    for key, value in chosen.items():
        above, _, name = key.rpartition(".")
        section = getattr(cfg, above).model_copy(update={name: value})
        cfg = cfg.model_copy(update={above: section})
    if not chosen:
        return cfg, []
    told = ", ".join(f"{key} {value}" for key, value in chosen.items())
    return cfg, [
        f"{told}: not set, so chosen to fit the model's context of {context_length} tokens"
    ]


def _chosen(cfg: Section, context: int) -> Iterator[tuple[str, int]]:
    """Keys that take another value than their default, with it."""
    if isinstance(cfg, SFTConfig):
        if "max_tokens" not in cfg.data.model_fields_set and cfg.data.max_tokens > context:
            yield "data.max_tokens", context
        return
    sections = _sampling(cfg)
    if not sections:
        return
    assert isinstance(cfg, RLConfig | EvaluateConfig | GenerateConfig)
    lengths = {name: getattr(cfg, name).max_completion_tokens for name in sections}
    free = [
        name
        for name in sections
        if "max_completion_tokens" not in getattr(cfg, name).model_fields_set
    ]
    prompt = cfg.data.max_prompt_tokens
    if prompt + max(lengths.values()) <= context:
        return
    if "max_prompt_tokens" not in cfg.data.model_fields_set:
        longest = max((n for name, n in lengths.items() if name not in free), default=0)
        room = context - longest
        prompt = min(prompt, context // 2, room) if free else min(prompt, room)
        if prompt < 1:
            return
        if prompt != cfg.data.max_prompt_tokens:
            yield _PROMPT, prompt
    for name in free:
        if 0 < context - prompt < lengths[name]:
            yield f"{name}.max_completion_tokens", context - prompt


def _sampling(cfg: Section) -> tuple[str, ...]:
    """Sections that say how long completions may be."""
    match cfg:
        case RLConfig():
            return ("rollout", "eval") if cfg.eval.is_scheduled else ("rollout",)
        case EvaluateConfig():
            return ("eval",)
        case GenerateConfig():
            return ("generation",)
        case _:
            return ()
