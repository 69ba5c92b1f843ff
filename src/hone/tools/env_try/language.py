"""Texts to tokens and back, for episodes that no model samples.

Where a recipe names a model, it is the model's tokenizer with its chat template, as in training
(`hone.tools.env_try.tokens`). Else it is `plain_language`, which renders no template: what it
counts are not tokens, and nothing is cut at a length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, cast

from hone.config.env_try import EnvTryConfig
from hone.data.columns import Example, ExampleReader, choose_columns
from hone.data.row_filters import InFileOrder, Sieve, load_filter
from hone.data.settings import SourceBase
from hone.data.sources import iter_source, source_names
from hone.data.template_check import RenderError
from hone.data.turns import Appended
from hone.errors import UserError
from hone.images.opening import open_image
from hone.images.parts import is_parts
from hone.images.store import STORE
from hone.model_input import TEXT
from hone.rewards.pool import describe
from hone.rollout.episodes import RenderTurn
from hone.rollout.requests import Decode
from hone.types import Message, Observation, Prompt, Sample

__all__ = ["Language", "examples_of", "in_words", "plain_language"]

_END = 256
"""Id that ends a turn, after those of all bytes."""
_UNLIMITED = 1 << 20
_TOOL_FORMAT = "hermes"
"""The commonest format of calls, where no chat template shows another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """How the prompts, turns and observations of a recipe become tokens."""

    prompts: Sequence[Prompt]
    encode: Callable[[str], Sequence[int]]
    """Ids of a text that the policy is to say; text that spells a special token becomes it."""
    decode: Decode
    render: RenderTurn
    end_id: int | None
    """Id that ends a turn; None where the model declares none."""
    max_tokens: int
    """Longest episode after the prompt, in tokens."""
    tool_format: str | None
    """The format in which calls of tools are written; None where none are read."""
    has_tokens: bool
    """Whether ids are those of a model, so that their number says something."""
    note: str = ""
    """What a person should know about the tokens."""


def examples_of(cfg: EnvTryConfig, num_rows: int) -> list[Example]:
    """The first rows of `data.train`, or of `data.eval` where that has none; without data, rows
    with an empty prompt. Raises UserError."""
    found: list[Example] = []
    sources: Sequence[SourceBase] = cfg.data.train or cfg.data.eval
    keep = load_filter(cfg.data.filter)
    for source, name in zip(sources, source_names(sources), strict=True):
        left = num_rows - len(found)
        if left > 0:
            wanted = (row for row in iter_source(source) if keep is None or keep(row))
            rows = list(islice(wanted, left))
            if not rows:
                raise UserError(f"{source.path}: data.filter wants none of the rows")
            read = ExampleReader(source, choose_columns(rows, source), name)
            skipped = InFileOrder(Sieve(cfg.data, read, None))(rows)
            kept = [row for row, why in zip(rows, skipped, strict=True) if why is None]
            found += read(kept, range(len(kept)))
    return found if sources else [_empty(number) for number in range(1, num_rows + 1)]


def _empty(number: int) -> Example:
    return Example(
        id=f"row:{number}",
        location=f"row {number}",
        prompt="",
        answer=None,
        completion=None,
        task="default",
        metadata={},
        columns={},
        raw_answer=None,
    )


def plain_language(cfg: EnvTryConfig, num_rows: int, note: str) -> Language:
    """Every byte is a token. Raises UserError for anything wrong with the rows."""
    return Language(
        prompts=[_prompt(example) for example in examples_of(cfg, num_rows)],
        encode=_encode,
        decode=_decode,
        render=_PlainRender(),
        end_id=_END,
        max_tokens=_UNLIMITED,
        tool_format=_tool_format(cfg),
        has_tokens=False,
        note=note,
    )


def _tool_format(cfg: EnvTryConfig) -> str | None:
    """The format of calls where no chat template shows one."""
    if not cfg.env.is_set or not describe(cfg.reward, cfg.env).needs_tool_format:
        return None
    return _TOOL_FORMAT if cfg.env.tool_format == "auto" else cfg.env.tool_format


def _prompt(example: Example) -> Prompt:
    asked = example.prompt
    messages = ({"role": "user", "content": asked},) if isinstance(asked, str) else tuple(asked)
    text = _written(messages)
    return Prompt(
        id=example.id,
        token_ids=_encode(text),
        text=text,
        answer=example.answer,
        task=example.task,
        metadata=example.metadata,
        unrendered=asked,
        raw_answer=example.raw_answer,
        messages=messages,
    )


def _encode(text: str) -> tuple[int, ...]:
    return tuple(text.encode(errors="replace"))


def _decode(token_ids: Sequence[int]) -> str:
    return bytes(number for number in token_ids if number < _END).decode(errors="replace")


def _written(messages: Sequence[Message]) -> str:
    return "".join(f"{in_words(message.get('content'))}\n" for message in messages)


def in_words(content: Any) -> str:
    """The content of a message for people, with the size of an image in its place."""
    if not isinstance(content, list | tuple):
        return str(content or "")
    parts = cast("Sequence[Mapping[str, Any]]", content)
    return "".join(_size(part) if part["type"] == "image" else str(part["text"]) for part in parts)


def _size(part: Mapping[str, Any]) -> str:
    if "hash" in part and (source := STORE.source(part["hash"])) is not None:
        file = source.file
    elif "image" in part:
        file = open_image(part["image"], folder=None)
    else:
        return "[image]"
    return f"[image of {file.width} x {file.height} pixels]"


class _PlainRender:
    """Messages one after the other, without a template."""

    num_cut = 0

    @property
    def ends(self) -> Mapping[int, str]:
        return {}

    def __call__(self, sample: Sample, observation: Observation, /) -> Appended:
        del sample
        if observation.token_ids:
            raise RenderError(
                "the environment answers with token_ids, which say nothing without a tokenizer; "
                "name the model's in model.tokenizer"
            )
        content, messages = observation.content, tuple[Message, ...]()
        is_one = isinstance(content, str) or is_parts(content)
        if not is_one:
            messages = tuple(cast("Sequence[Message]", content))
        elif observation.role is not None:
            messages = ({"role": observation.role, "content": content},)
        text = _written(messages) if messages else in_words(content)
        return Appended(text, messages, _encode(text), TEXT)

    def opening(self, prompt: Prompt, observation: Observation, /) -> Prompt:
        said = observation.content
        if isinstance(said, str) or is_parts(said):
            *earlier, last = prompt.messages
            content = in_words(last.get("content")) + in_words(said)
            messages = (*earlier, {**last, "content": content})
        else:
            messages = (*prompt.messages, *said)
        text = _written(messages)
        return replace(prompt, text=text, token_ids=_encode(text), messages=messages)
