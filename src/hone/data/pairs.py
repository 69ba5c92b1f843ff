"""Preferences: two completions of a prompt, or single ones with a label.

    {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    {"chosen": [{"role": "user", ...}, {"role": "assistant", ...}], "rejected": [...]}
    {"prompt": "2+2=", "completion": "4", "label": true}

These are the columns of TRL, plain and conversational; without `prompt` it is what `chosen` and
`rejected` have in common at their start.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeAlias

from hone.config.data import SourceBase
from hone.config.errors import UserError
from hone.config.tree import PairsDataConfig
from hone.data.chat import Demonstration, Renderer
from hone.data.columns import (
    Example,
    as_message,
    assistant_message,
    choose_column,
    prompt_in,
    required,
)
from hone.data.filters import LengthLimit
from hone.data.sources import Row as SourceRow
from hone.data.sources import short_name, shorten
from hone.data.split import Data, load_data
from hone.types import Message, Preference, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Compared", "PairsData", "load_pairs", "read_pairs"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compared:
    """A row of a file: completions of one prompt, the chosen one first, or one with its label."""

    id: str
    location: str
    completions: tuple[Example, ...]
    labels: tuple[bool, ...]


_NAMES = ("chosen", "rejected")
PairsData: TypeAlias = Data[Preference]


@dataclass(frozen=True, slots=True)
class _Rendered:
    completions: tuple[Demonstration, ...]

    @property
    def is_cut(self) -> bool:
        return any(each.is_cut for each in self.completions)


def load_pairs(
    cfg: PairsDataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int, is_unpaired: bool
) -> PairsData:
    """Read, render, filter and split the preferences of all sources. With
    `is_unpaired` each completion is an item of its own. Of a pair both rows keep the limits.

    Raises UserError for anything wrong with the data.
    """
    renderer = Renderer(tokenizer, cfg)

    def render(items: Sequence[Compared]) -> list[_Rendered]:
        rendered = iter(
            renderer.demonstrations(
                [example for item in items for example in item.completions],
                max_prompt_tokens=cfg.max_prompt_tokens,
                max_tokens=cfg.max_tokens,
            )
        )
        return [_Rendered(tuple(next(rendered) for _ in item.completions)) for item in items]

    def longest(length: Callable[[Demonstration], int]) -> Callable[[_Rendered], int]:
        return lambda row: max(map(length, row.completions))

    return load_data(
        cfg,
        read=partial(read_pairs, is_unpaired=is_unpaired),
        render=render,
        limits=[
            LengthLimit(
                "data.max_prompt_tokens",
                cfg.max_prompt_tokens,
                longest(lambda row: row.num_prompt_tokens),
            ),
            LengthLimit("data.max_tokens", cfg.max_tokens, longest(lambda row: len(row.token_ids))),
        ],
        make=_preference,
        content=lambda item: (item.id, item.token_ids, item.labels),
        seed=seed,
    )


def read_pairs(
    rows: Sequence[SourceRow], source: SourceBase, name: str, *, is_unpaired: bool
) -> list[Compared]:
    """The preferences of a source, with ids `<name>:<row>` counted from 1. With `is_unpaired` a
    pair is read as two labelled completions.

    Raises UserError naming row and remedy.
    """
    prompt = choose_column(rows, source, "prompt", required=False)
    if prompt == "messages":
        prompt = None
    named = {column for row in rows for column in row.columns}
    if is_unpaired and not {"chosen", "rejected"} <= named:
        completion = choose_column(rows, source, "completion")
        _require("label", named, source)
        columns = f"prompt {prompt}, completion {completion}, label"
        logger.info("%s: %s rows, %s", source.path, f"{len(rows):,}", columns)
        return [
            _labelled(row, source, f"{name}:{number}", prompt=prompt, completion=completion)
            for number, row in enumerate(rows, start=1)
        ]
    for column in _NAMES:
        _require(column, named, source)
    columns = f"prompt {prompt or 'their common start'}, chosen, rejected"
    logger.info("%s: %s rows, %s", source.path, f"{len(rows):,}", columns)
    pairs = [
        _pair(row, source, f"{name}:{number}", prompt=prompt)
        for number, row in enumerate(rows, start=1)
    ]
    same = [x for x in pairs if x.completions[0].completion == x.completions[1].completion]
    if same:
        logger.warning(
            "%s: %d of %d pairs have one completion twice, which teaches nothing; the first is %s",
            source.path,
            len(same),
            len(pairs),
            same[0].location,
        )
    return [single for pair in pairs for single in _singles(pair)] if is_unpaired else pairs


def _require(column: str, named: Collection[str], source: SourceBase) -> None:
    if column not in named:
        raise UserError(
            f"{source.path}: no column {column!r}; found {', '.join(sorted(named))}. Pairs need "
            "prompt (or a common start), chosen and rejected; rows of kto prompt, completion and "
            "label. Rename the columns."
        )


def _singles(pair: Compared) -> list[Compared]:
    return [
        Compared(f"{pair.id}:{'chosen' if label else 'rejected'}", pair.location, (x,), (label,))
        for x, label in zip(pair.completions, pair.labels, strict=True)
    ]


def _labelled(
    row: SourceRow, source: SourceBase, row_id: str, *, prompt: str | None, completion: str | None
) -> Compared:
    label = required(row, "label", "label")
    if label not in (True, False, 0, 1):
        raise UserError(
            f"{row.location}: the label must be true or false, got {shorten(json.dumps(label))}"
        )
    said = _assistant(required(row, completion, "completion"), row, completion or "")
    example = _example(row, source, row_id, prompt_in(row, prompt or "prompt"), said)
    return Compared(row_id, row.location, (example,), (bool(label),))


def _pair(row: SourceRow, source: SourceBase, row_id: str, *, prompt: str | None) -> Compared:
    values = [required(row, name, f"{name} completion") for name in _NAMES]
    kinds = {type(value) for value in values}
    if len(kinds) > 1 or not kinds <= {str, list}:
        raise UserError(
            f"{row.location}: chosen and rejected must both be text, or both lists of chat "
            f"messages, got {shorten(json.dumps(values, default=str))}"
        )
    if kinds == {list}:
        values = [[as_message(turn, row) for turn in value] for value in values]
        start = _shared_turns(*values)
        has_own_prompt = prompt is not None and start == 0
    else:
        has_own_prompt = prompt is not None
        start = 0 if has_own_prompt else _common_start(*values)
    asked: str | list[Message] = values[0][:start]
    if has_own_prompt:
        asked = prompt_in(row, prompt)
    said = [
        _assistant(value[start:], row, name) for value, name in zip(values, _NAMES, strict=True)
    ]
    if not asked or (isinstance(asked, str) and not asked.strip()):
        raise UserError(
            f"{row.location}: there is no column prompt, and chosen and rejected have no common "
            "start that could be it"
        )
    examples = tuple(_example(row, source, row_id, asked, message) for message in said)
    return Compared(row_id, row.location, examples, (True, False))


def _shared_turns(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Turns that both dialogues begin with; the last turn of each is its completion."""
    pairs = zip(chosen[:-1], rejected[:-1], strict=False)
    return sum(1 for _ in takewhile(lambda both: both[0] == both[1], pairs))


def _common_start(chosen: str, rejected: str) -> int:
    """Characters that both begin with, but for a space before the difference, which belongs to what
    follows."""
    pairs = zip(chosen, rejected, strict=False)
    length = sum(1 for _ in takewhile(lambda both: both[0] == both[1], pairs))
    return length - 1 if length and chosen[length - 1] == " " else length


def _assistant(value: Any, row: SourceRow, name: str) -> Message:
    must = f"{name} must be non-empty text, or end with one assistant message after the turns that "
    return assistant_message(value, row, must=f"{must}both share")


def _example(
    row: SourceRow,
    source: SourceBase,
    row_id: str,
    prompt: str | list[Message],
    completion: Message,
) -> Example:
    return Example(
        id=row_id,
        location=row.location,
        prompt=prompt,
        answer=None,
        completion=completion,
        task=source.task or short_name(source),
        metadata=dict(row.columns),
        columns=row.columns,
        raw_answer=None,
    )


def _preference(item: Compared, rendered: _Rendered) -> Preference:
    names = _NAMES if len(item.labels) > 1 else ("",)
    rows = tuple(
        Row(
            id=f"{item.id}:{name}" if name else item.id,
            token_ids=list(said.token_ids),
            loss_mask=[i >= said.num_prompt_tokens for i in range(len(said.token_ids))],
        )
        for said, name in zip(rendered.completions, names, strict=True)
    )
    return Preference(item.id, rows, item.labels)
