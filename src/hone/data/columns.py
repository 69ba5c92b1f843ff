"""Reads the prompt, the answer, the demonstration and the task from the columns of a row."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from hone.data.images import (
    NO_IMAGES,
    GivenImages,
    content_of,
    has_mark,
    take_images,
    values_in,
    without_bytes,
)
from hone.data.missing import is_silent, listed, nothing_in
from hone.data.row_ids import row_id
from hone.data.settings import SourceBase
from hone.data.sharegpt import sharegpt_problem
from hone.data.sources import SourceRow, short_name, shorten
from hone.errors import UserError
from hone.images.parts import IMAGE_COLUMNS, has_images
from hone.observe.column_values import as_text
from hone.types import Message, StopReason

if TYPE_CHECKING:
    from hone.images.reader import RowImage

__all__ = [
    "Columns",
    "Example",
    "ExampleReader",
    "ExampleReaders",
    "as_message",
    "assistant_message",
    "choose_column",
    "choose_columns",
    "is_truncated",
    "log_truncated",
    "map_rows",
    "prompt_in",
    "prompt_with_images",
    "read_examples",
    "required",
    "text_of",
    "value_of",
    "without_nulls",
]

logger = logging.getLogger(__name__)

USUAL_NAMES = {
    "prompt": (("prompt",), ("messages",), ("question", "problem", "input", "instruction")),
    "answer": (
        ("reward_model.ground_truth",),
        ("answer", "ground_truth"),
        ("solution", "label", "target"),
    ),
    "completion": (("completion", "response", "output"),),
    "task": (("task",), ("data_source", "datasource")),
    "chosen": (("chosen",),),
    "rejected": (("rejected",),),
    "label": (("label",),),
    "margin": (("margin",),),
    "images": (IMAGE_COLUMNS,),
}
"""Usual column names of each role, in tiers: the first tier with a column in the source is taken,
and two columns of one tier are ambiguous. verl's `reward_model.ground_truth` has no other meaning,
so it comes first. Where rows have an `answer` and a `solution`, the solution is the derivation."""


_UNFINISHED = frozenset(StopReason) - {StopReason.EOS, StopReason.STOP_STRING}
_ALPACA = (
    " Where the question is in both, as in Alpaca's rows, set `columns.prompt` to instruction and "
    'data.prompt_template to "{instruction}\\n\\n{input}".'
)
_NOUNS = {"chosen": "chosen completion", "rejected": "rejected completion"}


@dataclass(frozen=True, slots=True)
class Columns:
    """The column of each role; None where there is none or it is not needed."""

    prompt: str
    answer: str | None
    completion: str | None
    """Only for demonstrations."""
    task: str | None
    images: str | None
    demonstrations: bool

    def __str__(self) -> str:
        """A text for the log, with the layout that the columns show."""
        roles = ("prompt", "answer", "completion", "task", "images")
        named = {role: getattr(self, role) for role in roles}
        text = ", ".join(f"{role} from '{name}'" for role, name in named.items() if name)
        if self.answer == "reward_model.ground_truth":
            return f"verl's layout: {text}"
        if self.demonstrations and self.completion is None:
            return f"dialogues, of which the last message is to be learned: {text}"
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A row with the values of its roles, before it is rendered."""

    id: str
    location: str
    prompt: str | list[Message]
    answer: str | None
    completion: Message | None
    """The demonstration as an assistant message; None where demonstrations are not read."""
    task: str
    metadata: dict[str, Any]
    """Columns for reward functions: the row, with what `answer_pattern` extracted in the answer's
    column, and with messages as the chat template gets them."""
    columns: Mapping[str, Any]
    """All columns of the row, for prompt templates."""
    raw_answer: Any
    """The answer before it is converted to text, or what `answer_pattern` extracted."""
    is_truncated: bool = False
    """The completion was truncated when it was sampled, so it has no end (`is_truncated`)."""
    given_images: GivenImages = NO_IMAGES
    """Images of the prompt, in the order of its image parts, or of its marks if it is a text."""
    images: tuple[RowImage, ...] = ()
    """The same, opened (`hone.data.images.open_images`)."""

    @property
    def has_mark(self) -> bool:
        """Whether the text of the prompt has a mark of an image."""
        return has_mark(self.prompt)

    def with_images(self, images: tuple[RowImage, ...]) -> Example:
        """The example with its images opened."""
        return replace(self, images=images)


def choose_columns(
    rows: Sequence[SourceRow], source: SourceBase, *, demonstrations: bool = False
) -> Columns:
    """The column of each role, from `source.columns` or from the usual names.

    With `demonstrations` the completion is required and the answer is not read; without, a
    completion column has no role. Raises UserError where a role has no column, or several columns
    fit it.
    """
    prompt, completion, answer = choose_column(rows, source, "prompt"), None, None
    if demonstrations:
        completion = choose_column(rows, source, "completion", required=False)
        # The last message of a dialogue may be the demonstration.
        if completion is None and not _is_dialogue(rows, prompt):
            prompt = "messages" if source.columns.prompt is None else prompt
            if not _is_dialogue(rows, prompt):
                completion = choose_column(rows, source, "completion")
    else:
        needs_answer = source.answer_pattern is not None
        answer = choose_column(rows, source, "answer", required=needs_answer)
    task = choose_column(rows, source, "task", required=False) if source.task is None else None
    images = choose_column(rows, source, "images", required=False)
    assert prompt is not None
    return Columns(prompt, answer, completion, task, images, demonstrations)


class ExampleReader:
    """Reads rows of one source, some at a time, by chosen columns."""

    item_names = ("",)

    def __init__(self, source: SourceBase, columns: Columns, name: str) -> None:
        self._reader, self._name = _RowReader(source, columns), name
        self._kinds: dict[str, tuple[str, str]] = {}

    @property
    def content_columns(self) -> Sequence[str]:
        """Columns of which the content of a row consists, besides that of the images."""
        reader = self._reader
        named = [*reader.chosen.values(), "stop_reason" if reader.demonstrations else None]
        return [name for name in named if name]

    @property
    def images_column(self) -> str | None:
        """The column of the images, if there is one."""
        return self._reader.images

    def missing(self, row: SourceRow) -> str | None:
        """Why a row has no answer, or no demonstration, with its place; None where it has one, or
        none is read. Raises UserError for an answer that is no text."""
        return self._reader.missing(row)

    @classmethod
    def of_first(
        cls,
        rows: Sequence[SourceRow],
        source: SourceBase,
        name: str,
        *,
        demonstrations: bool = False,
    ) -> Self:
        """Choose the columns of a source from its first rows, and log them. Raises UserError."""
        columns = choose_columns(rows, source, demonstrations=demonstrations)
        logger.info("%s: %s", source.path, columns)
        return cls(source, columns, name)

    def __call__(self, rows: Sequence[SourceRow], numbers: Sequence[int]) -> list[Example]:
        """Examples of the rows with these numbers, counted from 0; their ids are `<name>:<row>`,
        counted from 1. Raises UserError naming row and remedy, also for a column that holds another
        kind of value than in the rows before."""
        examples: list[Example] = []
        for row, number in zip(rows, numbers, strict=True):
            self._reader.check_kinds(row, self._kinds)
            examples.append(self._reader.read(row, row_id(self._name, number)))
        return examples


@dataclass(frozen=True, kw_only=True)
class ExampleReaders:
    """Readers of prompts, or of demonstrations."""

    demonstrations: bool = False

    def by_all(self, rows: Sequence[SourceRow], source: SourceBase, name: str, /) -> ExampleReader:
        """The reader of a source of which `rows` are all."""
        columns = choose_columns(rows, source, demonstrations=self.demonstrations)
        logger.info("%s: %s rows, %s", source.path, f"{len(rows):,}", columns)
        return _WholeReader(source, columns, name)

    def by_first(
        self, rows: Sequence[SourceRow], source: SourceBase, name: str, /
    ) -> ExampleReader:
        """The reader of a source of which `rows` are the first."""
        return ExampleReader.of_first(rows, source, name, demonstrations=self.demonstrations)


class _WholeReader(ExampleReader):
    """Reads all rows of a source at once."""

    def __init__(self, source: SourceBase, columns: Columns, name: str) -> None:
        super().__init__(source, columns, name)
        self._source = source

    def __call__(self, rows: Sequence[SourceRow], numbers: Sequence[int]) -> list[Example]:
        """Call `ExampleReader`, and log how many completions are truncated."""
        examples = super().__call__(rows, numbers)
        log_truncated(self._source, examples)
        return examples


def map_rows(
    rows: Sequence[SourceRow], source: SourceBase, columns: Columns, *, name: str
) -> list[Example]:
    """Examples of all rows of a source, as `ExampleReader` reads them."""
    return ExampleReader(source, columns, name)(rows, range(len(rows)))


def read_examples(
    rows: Sequence[SourceRow], source: SourceBase, name: str, *, demonstrations: bool = False
) -> list[Example]:
    """Choose columns with `choose_columns`, log them, and read all rows with `map_rows`."""
    read = ExampleReaders(demonstrations=demonstrations).by_all(rows, source, name)
    return read(rows, range(len(rows)))


def text_of(value: Any, column: str, location: str) -> str:
    """The value of a column as text. Raises UserError for values such as null or NaN."""
    try:
        return as_text(value)
    except ValueError as error:
        raise UserError(
            f"{location}: column {column!r} holds {error}; put text or a number there, or remove "
            "the row"
        ) from error


class _RowReader:
    """Reads single rows of a source with chosen columns."""

    def __init__(self, source: SourceBase, columns: Columns) -> None:
        self.chosen: dict[str, str | None] = {
            "prompt": columns.prompt,
            "answer": columns.answer,
            "completion": columns.completion,
            "task": columns.task,
        }
        self.images = columns.images
        self.demonstrations = columns.demonstrations
        self.default_task = source.task or short_name(source)
        self.pattern = _compile(source.answer_pattern)

    def read(self, row: SourceRow, own_id: str) -> Example:
        prompt = prompt_in(row, self.chosen["prompt"])
        completion = None
        if self.demonstrations:
            prompt, completion = self._demonstration(row, prompt)
        elif not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
            raise UserError(
                f"{row.location}: the prompt ends with an assistant message, so there is nothing "
                "left to sample; remove that message"
            )
        prompt, given = prompt_with_images(row, prompt, self.images)
        task = self.default_task
        if self.chosen["task"] is not None:
            task = text_of(
                required(row, self.chosen["task"], "task"), self.chosen["task"], row.location
            )
        answer, column = self._answer(row), self.chosen["answer"]
        raw, metadata = value_of(row.columns, column), dict(row.columns)
        if self.chosen["prompt"] in metadata and not self.demonstrations:
            metadata |= {self.chosen["prompt"]: prompt}
        if self.pattern is not None:
            raw = answer
            metadata |= {column: answer} if column in metadata else {}
        if given.values:
            metadata = without_bytes(metadata)
        return Example(
            id=own_id,
            location=row.location,
            prompt=prompt,
            answer=answer,
            completion=completion,
            task=task,
            metadata=metadata,
            columns=row.columns,
            raw_answer=raw,
            is_truncated=self.demonstrations and is_truncated(row, "stop_reason"),
            given_images=given,
        )

    def check_kinds(self, row: SourceRow, kinds: dict[str, tuple[str, str]]) -> None:
        """Refuse a column that holds text in one row and a list in another."""
        for role, column in self.chosen.items():
            if column is None:
                continue
            kind = _kind(value_of(row.columns, column))
            first = kinds.setdefault(role, (kind, row.location))
            if kind not in (first[0], "nothing"):
                raise UserError(
                    f"{row.location}: column {column!r} holds {kind}, but {first[0]} in "
                    f"{first[1]}; all rows of a source must be of one kind"
                )

    def _answer(self, row: SourceRow) -> str | None:
        column = self.chosen["answer"]
        if column is None:
            return None
        answer = text_of(required(row, column, "answer"), column, row.location)
        if self.pattern is None:
            return answer
        extracted = self._extracted(answer)
        if not extracted:
            raise UserError(self._unmatched(row, column, answer))
        return extracted.strip()

    def _extracted(self, answer: str) -> str:
        """What the pattern finds in an answer; empty where it finds nothing."""
        assert self.pattern is not None
        match = self.pattern.search(answer)
        return (match and (match[1] if self.pattern.groups else match[0])) or ""

    def _unmatched(self, row: SourceRow, column: str, answer: str) -> str:
        assert self.pattern is not None
        return (
            f"{row.location}: answer_pattern {self.pattern.pattern!r} finds nothing in "
            f"column {column!r}: {shorten(answer)}"
        )

    def missing(self, row: SourceRow) -> str | None:
        """What `ExampleReader.missing` says."""
        if self.demonstrations:
            column = self.chosen["completion"] or self.chosen["prompt"]
            # A dialogue of which nothing is left has no prompt, which is another mistake.
            is_dialogue = self.chosen["completion"] is None
            value = value_of(row.columns, column)
            has_none = bool(value) and is_silent(value) if is_dialogue else is_silent(value)
            return nothing_in(row, column, "completion") if has_none else None
        column = self.chosen["answer"]
        if column is None:
            return None
        value = value_of(row.columns, column)
        if value is None or (isinstance(value, str) and not value.strip()):
            return nothing_in(row, column, "answer")
        if self.pattern is None:
            return None
        answer = text_of(value, column, row.location)
        is_found = self._extracted(answer).strip()
        return None if is_found else self._unmatched(row, column, answer)

    def _demonstration(
        self, row: SourceRow, prompt: str | list[Message]
    ) -> tuple[str | list[Message], Message]:
        if self.chosen["completion"] is not None:
            value: Any = required(row, self.chosen["completion"], "completion")
        else:
            assert isinstance(prompt, list)
            prompt, value = prompt[:-1], prompt[-1:]
        message = assistant_message(
            value,
            row,
            must="a demonstration must be non-empty text, or one assistant message with text or "
            "tool_calls at the end of the dialogue; remove the row",
        )
        if not prompt:
            raise UserError(f"{row.location}: no message stands before the demonstration")
        return prompt, message


def choose_column(
    rows: Sequence[SourceRow], source: SourceBase, role: str, *, required: bool = True
) -> str | None:
    """The column of a role, from `source.columns` or from the usual names, or None.

    Raises UserError where a required role has no column, or several columns fit it.
    """
    key = "answer" if role == "completion" else role
    named: str | None = getattr(source.columns, key)
    if role == "images" and named == "":
        return None
    tiers = USUAL_NAMES[role] if named is None else ((named,),)
    for tier in tiers:
        present = [n for n in tier if any(value_of(row.columns, n) is not None for row in rows)]
        if len(present) > 1:
            both = _ALPACA if {"instruction", "input"} <= set(present) else ""
            raise UserError(
                f"{source.path}: the {role} may be in any of the columns {', '.join(present)}. "
                f"Name the right one in `columns.{key}` of this source.{both}"
            )
        if present:
            _refuse_sharegpt(rows, source, present)
            return present[0]
    if named is None and not required:
        return None
    if named is None and role in {"prompt", "completion"}:
        _refuse_sharegpt(rows, source, rows[0].columns)
    candidates = ", ".join(name for tier in tiers for name in tier)
    columns = dict.fromkeys(
        f"{name} (null in all rows looked at)" if any(name in tier for tier in tiers) else name
        for row in rows
        for name in row.columns
    )
    raise UserError(
        f"{source.path}: no column for the {_NOUNS.get(role, role)}: looked for {candidates}; "
        f"found {listed(columns)}. Name the right one in `columns.{key}` of this source."
    )


def _refuse_sharegpt(rows: Sequence[SourceRow], source: SourceBase, names: Iterable[str]) -> None:
    """Raise UserError where a column of `names` has ShareGPT's turns."""
    for name in names:
        turns = next((v for row in rows if (v := value_of(row.columns, name)) is not None), None)
        if (problem := sharegpt_problem(source, name, turns)) is not None:
            raise UserError(problem)


def required(row: SourceRow, column: str | None, role: str) -> Any:
    """The value of the column of `role`. Raises UserError where the row has none."""
    value = value_of(row.columns, column)
    if value is None:
        raise UserError(nothing_in(row, column, role))
    return value


def prompt_in(row: SourceRow, column: str | None) -> str | list[Message]:
    """The prompt in a column. Raises UserError where it is neither text nor messages."""
    value = required(row, column, "prompt")
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value:
        return [as_message(turn, row) for turn in value]
    raise UserError(
        f"{row.location}: the prompt in column {column!r} must be non-empty text or a list of "
        f"chat messages, got {shorten(json.dumps(value, default=str))}"
    )


def prompt_with_images(
    row: SourceRow, prompt: str | list[Message], column: str | None
) -> tuple[str | list[Message], GivenImages]:
    """A prompt without the values of its images, and these, with those of `column`. Raises
    UserError (`take_images`)."""
    return take_images(prompt, row, column, values_in(value_of(row.columns, column)))


def assistant_message(
    value: Any, row: SourceRow, *, must: str, may_be_empty: bool = False
) -> Message:
    """A completion, text or a list of one message, as an assistant message. Raises UserError, with
    the text `must`, for anything else and, unless it `may_be_empty`, for a message without content
    and tool calls."""
    turns = [{"role": "assistant", "content": value}] if isinstance(value, str) else value
    is_turn = isinstance(turns, list) and len(turns) == 1
    message = as_message(turns[0], row) if is_turn else {"role": "", "content": ""}
    content = message["content"]
    if has_images(content):
        raise UserError(
            f"{row.location}: the answer has an image, and models answer with text alone; remove "
            "the image or the row"
        )
    if (
        message["role"] != "assistant"
        or not isinstance(content, str)
        or not (content or may_be_empty or message.get("tool_calls"))
    ):
        shown = shorten(json.dumps(turns, default=str))
        raise UserError(f"{row.location}: {must}, got {shown}")
    return message


def _is_dialogue(rows: Sequence[SourceRow], column: str | None) -> bool:
    return isinstance(value_of(rows[0].columns, column), list)


def value_of(columns: Mapping[str, Any], name: str | None) -> Any:
    """The value of a column, or of the field `outer.inner` of a column with objects; else None."""
    if name is None or name in columns:
        return columns.get(name) if name else None
    value: Any = columns
    for part in name.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def as_message(turn: Any, row: SourceRow) -> Message:
    """A message of a dialogue in a row. Raises UserError for what is not a message."""
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        shown = shorten(json.dumps(turn, default=str))
        raise UserError(f"{row.location}: a chat message needs a role and content, got {shown}")
    message: Message = without_nulls(turn, keep=() if row.is_padded else ("arguments",))
    if "content" not in message and "tool_calls" not in message:
        raise UserError(f"{row.location}: a {turn['role']!r} message has no content")
    return {**message, "content": content_of(message.get("content", ""), row)}


def is_truncated(row: SourceRow, column: str) -> bool:
    """Whether a column, with a `stop_reason` as `hone generate` writes it, says that a completion
    was truncated, for example at the length limit."""
    value = row.columns.get(column)
    return isinstance(value, str) and value in _UNFINISHED


def log_truncated(source: SourceBase, examples: Sequence[Example]) -> None:
    """Log how many completions of a source are truncated, if any."""
    if cut := sum(example.is_truncated for example in examples):
        logger.info(
            "%s: %s of %s completions were cut as they were sampled, by their stop_reason: no end "
            "token is trained behind them",
            source.path,
            f"{cut:,}",
            f"{len(examples):,}",
        )


def without_nulls(value: Any, *, keep: Collection[str] = ()) -> Any:
    """A value without null fields of objects at any depth, except inside of fields named in `keep`.

    Arrow, and so Parquet and `datasets`, gives every object of a column the fields of all others,
    and chat templates would take these nulls for values.
    """
    if isinstance(value, Mapping):
        return {
            key: item if key in keep else without_nulls(item, keep=keep)
            for key, item in value.items()
            if item is not None
        }
    return [without_nulls(item, keep=keep) for item in value] if isinstance(value, list) else value


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, list):
        return "a list"
    return "an object" if isinstance(value, dict) else "text or a number"


def _compile(pattern: str | None) -> re.Pattern[str] | None:
    if pattern is None:
        return None
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(
            f"answer_pattern {pattern!r} is not a regular expression: {error}"
        ) from error
