"""Preferences: two completions of a prompt, or single ones with a label.

    {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    {"chosen": [{"role": "user", ...}, {"role": "assistant", ...}], "rejected": [...]}
    {"prompt": "2+2=", "completion": "4", "label": true}

These are the columns of TRL, plain and conversational; a source may name others. Without `prompt`,
the prompt is the common start of `chosen` and `rejected`. Where all completions repeat the prompt,
it is removed from them. An empty completion ends at once: only its end token is trained.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hone.config.tree import PairsDataConfig
from hone.data.chat import Demonstration, Renderer
from hone.data.columns import (
    Example,
    as_message,
    assistant_message,
    is_truncated,
    log_truncated,
    prompt_in,
    prompt_with_images,
    required,
    value_of,
)
from hone.data.filters import LengthLimit
from hone.data.images import GivenImages, without_bytes
from hone.data.loading import load_data
from hone.data.pair_columns import (
    NAMES,
    STOP_REASONS,
    PairColumns,
    choose_pair_columns,
    common_start,
    without_prompt,
)
from hone.data.prompts import is_put_into_template, show_template
from hone.data.row_ids import row_id
from hone.data.settings import SourceBase
from hone.data.sources import SourceRow, short_name, shorten
from hone.data.split import Data
from hone.errors import UserError
from hone.model_input import ModelInput
from hone.types import Message, Preference, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hone.images.reader import ImageReader, RowImage

__all__ = [
    "Compared",
    "PairReader",
    "PairReaders",
    "PairsData",
    "load_pairs",
    "map_chosen_pairs",
    "map_pairs",
    "read_pairs",
    "single_completions",
    "weak_pairs",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compared:
    """A row of a file: a pair of completions of one prompt, the chosen one first, or a single
    completion with its label."""

    id: str
    location: str
    completions: tuple[Example, ...]
    labels: tuple[bool, ...]
    margin: float = 0.0
    is_split: bool = False
    """Whether the texts were split into the prompt, their common start, and the completions."""

    @property
    def given_images(self) -> GivenImages:
        """The images of the prompt that the completions share."""
        return self.completions[0].given_images

    @property
    def has_mark(self) -> bool:
        """Whether the text of the prompt has a mark of an image."""
        return self.completions[0].has_mark

    def with_images(self, images: tuple[RowImage, ...]) -> Compared:
        """The row with its images opened."""
        examples = tuple(example.with_images(images) for example in self.completions)
        return replace(self, completions=examples)


_NOTHING: Message = {"role": "assistant", "content": ""}
PairsData: TypeAlias = Data[Preference]


@dataclass(frozen=True, slots=True)
class _Rendered:
    completions: tuple[Demonstration, ...]

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.completions[0].prompt_ids

    @property
    def model_input(self) -> ModelInput:
        return self.completions[0].model_input

    @property
    def is_cut(self) -> bool:
        return any(each.is_cut for each in self.completions)


def load_pairs(
    cfg: PairsDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    is_unpaired: bool = False,
    for_reward_model: bool = False,
    end_ids: Collection[int] = (),
    images: ImageReader | None = None,
    cache: Path | None = None,
) -> PairsData:
    """Read, render, filter and split the preferences of all sources. With `is_unpaired` each
    completion is a preference of its own. A pair is kept only if both of its rows are within the
    limits. With `for_reward_model` rows are rendered as transcripts, and a source may have a column
    of margins. `end_ids` and `images` are passed to `Renderer`, `cache` is a folder for indexes of
    large sources.

    Raises UserError for anything wrong with the data.
    """
    renderer = Renderer(tokenizer, cfg, end_ids=end_ids, images=images)

    def render(items: Sequence[Compared]) -> list[_Rendered]:
        split = next((item for item in items if item.is_split), None)
        if renderer.uses_chat and split is not None:
            raise UserError(
                f"{split.location}: chosen and rejected are texts without a prompt, and the chat "
                "template needs to know which part of them is the user's message. Add a column "
                "prompt, write them as chat messages, or set data.chat to 'never' to train the "
                "texts as they are"
            )
        render_rows = renderer.transcripts if for_reward_model else renderer.demonstrations
        rendered = iter(
            render_rows(
                [example for item in items for example in item.completions],
                max_prompt_tokens=cfg.max_prompt_tokens,
                max_tokens=cfg.max_tokens,
            )
        )
        return [_Rendered(tuple(next(rendered) for _ in item.completions)) for item in items]

    shown: list[str] = []

    def make(item: Compared, rendered: _Rendered) -> Preference:
        first = rendered.completions[0]
        if not shown and is_put_into_template(item.completions[0].prompt, renderer, cfg):
            shown.append(str(tokenizer.decode([*first.token_ids])))
            show_template("preferences", shown[0])
        return _preference(item, rendered)

    def longest(length: Callable[[Demonstration], int]) -> Callable[[_Rendered], int]:
        return lambda row: max(map(length, row.completions))

    return load_data(
        cfg,
        readers=PairReaders(
            is_unpaired=is_unpaired,
            reads_margin=for_reward_model,
            drops_missing=cfg.missing_answers == "drop",
        ),
        render=render,
        limits=[
            LengthLimit(
                "data.max_prompt_tokens",
                cfg.max_prompt_tokens,
                longest(lambda row: row.num_prompt_tokens),
            ),
            LengthLimit("data.max_tokens", cfg.max_tokens, longest(lambda row: len(row.token_ids))),
        ],
        make=make,
        content=_content,
        seed=seed,
        images=images,
        cache=cache,
    )


def read_pairs(
    rows: Sequence[SourceRow],
    source: SourceBase,
    name: str,
    *,
    is_unpaired: bool = False,
    reads_margin: bool = False,
) -> list[Compared]:
    """The preferences of a source, with ids `<name>:<row>` counted from 1. Logs their columns, and
    warns of rows from which little can be learned. With `is_unpaired` a pair is read as two
    labelled completions. `source.columns` are a `PairColumnsConfig`.

    Raises UserError naming row and remedy.
    """
    readers = PairReaders(is_unpaired=is_unpaired, reads_margin=reads_margin)
    return readers.by_all(rows, source, name)(rows, range(len(rows)))


def map_pairs(
    rows: Sequence[SourceRow],
    source: SourceBase,
    *,
    is_unpaired: bool = False,
    reads_margin: bool = False,
    drops_missing: bool = False,
) -> tuple[list[Compared], list[str]]:
    """The preferences of `rows`, the first of a source, and the warnings that `read_pairs` would
    log; nothing is logged. With `drops_missing` rows with a completion that says nothing are left
    out. Raises the errors of `read_pairs`."""
    by_role = choose_pair_columns(rows, source, is_unpaired=is_unpaired, reads_margin=reads_margin)
    columns, repeated = PairColumns.settled(rows, by_role, "first ", drops_missing=drops_missing)
    if drops_missing:
        rows = [row for row in rows if columns.missing(row) is None]
    rows = without_prompt(rows, by_role)[0] if columns.repeats else rows
    items = map_chosen_pairs(rows, source, by_role, source.path)
    return items, repeated + weak_pairs(items, "first ")


@dataclass(frozen=True, kw_only=True)
class PairReaders:
    """Readers of preferences, with the arguments of `read_pairs`."""

    is_unpaired: bool
    reads_margin: bool
    drops_missing: bool = False
    """Whether rows with a completion that says nothing are left out before they are read."""

    def by_all(self, rows: Sequence[SourceRow], source: SourceBase, name: str, /) -> PairReader:
        """The reader of a source of which `rows` are all."""
        return PairReader(rows, source, name, self, is_whole=True)

    def by_first(self, rows: Sequence[SourceRow], source: SourceBase, name: str, /) -> PairReader:
        """The reader of a source of which `rows` are the first."""
        return PairReader(rows, source, name, self, is_whole=False)


class PairReader:
    """Reads preferences of one source by the columns of its rows, or of its first ones; whether
    completions repeat their prompts is decided by these too."""

    def __init__(
        self,
        rows: Sequence[SourceRow],
        source: SourceBase,
        name: str,
        options: PairReaders,
        *,
        is_whole: bool,
    ) -> None:
        """Raises the errors of `read_pairs`."""
        self._source, self._name = source, name
        self._is_whole = is_whole
        by_role = choose_pair_columns(
            rows, source, is_unpaired=options.is_unpaired, reads_margin=options.reads_margin
        )
        self._is_split = options.is_unpaired and "chosen" in by_role
        roles = ", ".join(f"{role} from '{x}'" for role, x in by_role.items() if x)
        num_rows = f"{len(rows):,} rows, " if is_whole else ""
        logger.info("%s: %s%s", source.path, num_rows, roles)
        self.columns, problems = PairColumns.settled(
            rows, by_role, "" if is_whole else "first ", drops_missing=options.drops_missing
        )
        for problem in problems:
            logger.warning("%s: %s", source.path, problem)

    @property
    def item_names(self) -> Sequence[str]:
        """The completions of a pair, where each is an item of its own."""
        return NAMES if self._is_split and not self._is_whole else ("",)

    @property
    def content_columns(self) -> Sequence[str]:
        """Columns of which the content of a row consists, besides that of the images."""
        return self.columns.content_columns

    @property
    def images_column(self) -> str | None:
        """The column of the images, if there is one."""
        return self.columns.images_column

    def missing(self, row: SourceRow) -> str | None:
        """Why a completion of a row says nothing, with its place; None where none does."""
        return self.columns.missing(row)

    def __call__(self, rows: Sequence[SourceRow], numbers: Sequence[int]) -> list[Compared]:
        """Preferences with these numbers, counted from 0: of rows, or of the items of rows, which
        come with the row of each. Raises UserError naming row and remedy."""
        by_role = self.columns.by_role
        if self.columns.repeats and rows:
            shortened, _ = without_prompt(rows, by_role)
            if shortened is rows:
                raise UserError(
                    f"{self._source.path}: the completions of the first rows begin with their "
                    f"prompts, and not all do that are read with {rows[0].location}. Take the "
                    "prompts off the completions of all rows"
                )
            rows = shortened
        places = [divmod(number, len(self.item_names)) for number in numbers]
        row_numbers = [number for number, _ in places]
        items = map_chosen_pairs(rows, self._source, by_role, self._name, row_numbers)
        if self._is_whole:
            return self._of_all(items)
        if not self._is_split:
            return items
        return [
            single_completions(pair)[item] for pair, (_, item) in zip(items, places, strict=True)
        ]

    def _of_all(self, items: list[Compared]) -> list[Compared]:
        """The preferences of all rows, with warnings of those from which little can be learned."""
        for problem in weak_pairs(items):
            logger.warning("%s: %s", self._source.path, problem)
        log_truncated(self._source, [example for item in items for example in item.completions])
        if not self._is_split:
            return items
        return [each for item in items for each in single_completions(item)]


def map_chosen_pairs(
    rows: Sequence[SourceRow],
    source: SourceBase,
    columns: Mapping[str, str | None],
    name: str,
    numbers: Sequence[int] | None = None,
) -> list[Compared]:
    """The preferences of `rows` with the `columns` that `choose_pair_columns` has chosen, and ids
    `<name>:<row>` counted from 1; `numbers` are those of the rows, counted from 0. Raises UserError
    naming row and remedy."""
    read = _pair if "chosen" in columns else _labelled
    numbers = range(len(rows)) if numbers is None else numbers
    return [
        read(row, source, row_id(name, number), columns)
        for row, number in zip(rows, numbers, strict=True)
    ]


def weak_pairs(items: Sequence[Compared], which: str = "") -> list[str]:
    """Warnings of rows whose two completions are equal, and of rows whose chosen completion is
    empty: the number of such rows and the location of the first."""
    pairs = [x for x in items if len(x.completions) > 1]
    same = [x for x in pairs if x.completions[0].completion == x.completions[1].completion]
    empty = [x for x in items if x.labels[0] and x.completions[0].completion == _NOTHING]
    kinds = {
        "have one completion twice, which teaches nothing": same,
        "prefer to say nothing, which teaches to end at once": empty,
    }
    return [
        f"{len(found):,} of the {which}{len(items):,} rows {what}; the first is {found[0].location}"
        for what, found in kinds.items()
        if found
    ]


def single_completions(pair: Compared) -> list[Compared]:
    """The two completions of a pair, each as a preference with its label."""
    return [
        Compared(f"{pair.id}:{name}", pair.location, (x,), (label,), is_split=pair.is_split)
        for x, label, name in zip(pair.completions, pair.labels, NAMES, strict=True)
    ]


def _labelled(
    row: SourceRow, source: SourceBase, own_id: str, columns: Mapping[str, str | None]
) -> Compared:
    label = required(row, columns["label"], "label")
    if label not in (True, False, 0, 1):
        raise UserError(
            f"{row.location}: the label must be true or false, got {shorten(repr(label))}"
        )
    said = _assistant(required(row, columns["completion"], "completion"), row, "completion")
    asked, is_cut = prompt_in(row, columns["prompt"]), is_truncated(row, "stop_reason")
    prompt = prompt_with_images(row, asked, columns["images"])
    example = _example(row, source, own_id, prompt, said, is_truncated=is_cut)
    return Compared(own_id, row.location, (example,), (bool(label),))


def _pair(
    row: SourceRow, source: SourceBase, own_id: str, columns: Mapping[str, str | None]
) -> Compared:
    values = [required(row, columns[name], f"{name} completion") for name in NAMES]
    kinds = {type(value) for value in values}
    if len(kinds) > 1 or not kinds <= {str, list}:
        raise UserError(
            f"{row.location}: chosen and rejected must both be text, or both lists of chat "
            f"messages, got {shorten(json.dumps(values, default=str))}"
        )
    prompt = columns["prompt"]
    if kinds == {list}:
        values = [[as_message(turn, row) for turn in value] for value in values]
        start = _shared_turns(*values)
        has_own_prompt = prompt is not None and start == 0
    else:
        has_own_prompt = prompt is not None
        start = 0 if has_own_prompt else common_start(*values)
    asked: str | list[Message] = values[0][:start]
    if has_own_prompt:
        asked = prompt_in(row, prompt)
    elif isinstance(value_of(row.columns, prompt), list):
        own = prompt_in(row, prompt)
        # The common turns may be only the end of the prompt in its own column.
        asked = own if own[-start:] == asked else asked
    said = [_assistant(value[start:], row, name) for value, name in zip(values, NAMES, strict=True)]
    if not asked or (isinstance(asked, str) and not asked.strip()):
        raise UserError(
            f"{row.location}: there is no column prompt, and chosen and rejected have no common "
            "start that could be it"
        )
    shared = prompt_with_images(row, asked, columns["images"])
    return Compared(
        own_id,
        row.location,
        tuple(
            _example(row, source, own_id, shared, message, is_truncated=is_truncated(row, column))
            for message, column in zip(said, STOP_REASONS, strict=True)
        ),
        (True, False),
        margin=_margin(row, columns.get("margin")),
        is_split=kinds == {str} and not has_own_prompt,
    )


def _margin(row: SourceRow, column: str | None) -> float:
    if column is None:
        return 0.0
    value = required(row, column, "margin")
    is_number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        shown = shorten(repr(value))
        raise UserError(f"{row.location}: the margin must be a finite number, got {shown}")
    return float(value)


def _shared_turns(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """The number of common first turns; the last turn of each dialogue is its completion."""
    pairs = zip(chosen[:-1], rejected[:-1], strict=False)
    return sum(1 for _ in takewhile(lambda both: both[0] == both[1], pairs))


def _assistant(value: Any, row: SourceRow, name: str) -> Message:
    must = f"{name} must be text, or end with one assistant message after the turns that both share"
    return assistant_message(value, row, must=must, may_be_empty=True)


def _example(
    row: SourceRow,
    source: SourceBase,
    own_id: str,
    prompt: tuple[str | list[Message], GivenImages],
    completion: Message,
    *,
    is_truncated: bool,
) -> Example:
    asked, given = prompt
    if is_truncated and not completion["content"]:
        raise UserError(
            f"{row.location}: by its stop_reason a completion was cut before it said anything, so "
            "that nothing of it can be learned; remove the row"
        )
    return Example(
        id=own_id,
        location=row.location,
        prompt=asked,
        answer=None,
        completion=completion,
        task=source.task or short_name(source),
        metadata=without_bytes(row.columns) if given.values else dict(row.columns),
        columns=row.columns,
        raw_answer=None,
        is_truncated=is_truncated,
        given_images=given,
    )


def _content(item: Preference) -> object:
    contents = (key for row in item.rows for key in row.model_input.key)
    return item.id, item.token_ids, item.labels, item.margin, *contents


def _preference(item: Compared, rendered: _Rendered) -> Preference:
    names = NAMES if len(item.labels) > 1 else ("",)
    rows = tuple(
        Row(
            id=f"{item.id}:{name}" if name else item.id,
            token_ids=list(said.token_ids),
            loss_mask=[i >= said.num_prompt_tokens for i in range(len(said.token_ids))],
            model_input=said.model_input,
        )
        for said, name in zip(rendered.completions, names, strict=True)
    )
    return Preference(item.id, rows, item.labels, item.margin)
