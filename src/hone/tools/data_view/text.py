"""Rows as texts and, where a model is named, as its tokens.

Without a model lengths are in characters and nothing is rendered (`plain_text`). With one,
`hone.tools.data_view.tokens` renders rows exactly as a run does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from hone.data.columns import Example
from hone.data.filters import FilterReport, LengthLimit
from hone.data.images import without_bytes
from hone.errors import UserError
from hone.images.parts import has_images
from hone.model_input import TEXT, ModelInput
from hone.tools.data_view.counts import digest_of
from hone.tools.data_view.problems import Problems
from hone.tools.data_view.reading import Item, attempt, examples_of

__all__ = ["Entry", "Language", "NoTokenizerError", "Text", "open_all", "plain_text", "said"]


class NoTokenizerError(UserError):
    """The tokenizer that is named is not here, or cannot be read."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, with a completion where the row has one, as the model reads it."""

    token_ids: tuple[int, ...]
    """Empty without a model."""
    num_prompt: int
    """Length of the prompt, in the unit of the language."""
    num_whole: int
    first_trained: int | None = None
    """The first token that is trained; None where nothing of the row is."""

    @property
    def num_completion(self) -> int:
        return self.num_whole - self.num_prompt


@dataclass(frozen=True, slots=True)
class Entry:
    """What a run would make of a row: one text, or those of a pair."""

    texts: tuple[Text, ...]
    digest: int
    """Of the prompt: rows with the same one ask a model the same."""
    prompt_ids: tuple[int, ...] = ()
    model_input: ModelInput = TEXT
    is_cut: bool = False
    """Only its beginning was tokenised, which is too long already."""

    @property
    def num_prompt(self) -> int:
        return max(text.num_prompt for text in self.texts)

    @property
    def num_whole(self) -> int:
        return max(text.num_whole for text in self.texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """How rows become texts and are measured."""

    unit: str
    """`tokens` or `characters`."""
    render: Callable[[Sequence[Item], bool], list[Entry]]
    """The entries of rows. With True rows far longer than the limits are cut, as in a run."""
    open_images: Callable[[Sequence[Item], FilterReport], list[Item]]
    """The rows with their images opened, less those that are dropped for an image."""
    limits: Sequence[LengthLimit[Entry]] = ()
    """Those of the run, in its order."""
    pieces: Callable[[Sequence[int]], list[str]] = field(default=lambda ids: [""] * len(ids))
    """The text that each token adds."""
    special_ids: frozenset[int] = frozenset()
    unknown: Callable[[Sequence[int]], str | None] = field(default=lambda ids: None)
    """What a row has that the model lacks tokens for."""
    uses_chat: bool = False
    note: str = ""
    """What a person should know about the lengths."""

    @property
    def has_tokens(self) -> bool:
        return self.unit == "tokens"


def plain_text(note: str) -> Language:
    """Texts are neither rendered nor tokenised; lengths are in characters."""
    return Language(
        unit="characters",
        render=lambda items, is_limited: [_entry(item) for item in items],
        open_images=lambda items, report: list(items),
        note=note,
    )


def said(content: Any) -> str:
    """The content of a message as text, with a mark for each image."""
    if not has_images(content):
        return str(content or "")
    return "".join("<image>" if part["type"] == "image" else part["text"] for part in content)


def open_all(
    items: Sequence[Item], language: Language, problems: Problems, report: FilterReport
) -> list[Item]:
    """The rows with their images opened. Those that are dropped for an image are added to the
    report; those with an image that is an error, to the problems."""

    def opened(some: Sequence[Item]) -> list[list[Item]]:
        known = FilterReport()
        try:
            found = {item.id: item for item in language.open_images(some, known)}
        except UserError:
            # A run refuses a source of which every image is unreadable, not such a row.
            if len(some) > 1 or not known.unreadable:
                raise
            found = {}
        report.unreadable += known.unreadable
        return [[found[item.id]] if item.id in found else [] for item in some]

    return [item for _, found in attempt(items, opened, problems) for item in found]


def _entry(item: Item) -> Entry:
    examples = examples_of(item)
    texts = tuple(map(_text, examples))
    asked = examples[0]
    values = [_identity(value) for value in asked.given_images.values]
    key = json.dumps([asked.prompt, values], sort_keys=True, default=str)
    return Entry(texts, digest_of(key))


def _text(example: Example) -> Text:
    asked = example.prompt
    messages = [{"content": asked}] if isinstance(asked, str) else asked
    num_prompt = sum(len(said(message.get("content"))) for message in messages)
    answer = example.completion
    num_answer = 0 if answer is None else len(said(answer["content"]))
    return Text((), num_prompt, num_prompt + num_answer)


def _identity(value: Any) -> str:
    """What tells an image from others, without its bytes."""
    if isinstance(value, bytes):
        return blake2b(value, digest_size=8).hexdigest()
    if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
        return blake2b(value["bytes"], digest_size=8).hexdigest()
    return value if isinstance(value, str) else str(without_bytes(value))
