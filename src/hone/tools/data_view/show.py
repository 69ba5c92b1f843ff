"""`hone data show`: columns, how they are read, and rows as a run would have them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from hone.data.columns import Example, value_of
from hone.data.filters import REASONS, FilterReport
from hone.data.images import without_bytes
from hone.data.row_source import Skipped
from hone.data.sources import SourceRow, shorten
from hone.errors import UserError
from hone.tools.data_view.chosen import HEAD_ROWS, Viewed
from hone.tools.data_view.problems import Problems
from hone.tools.data_view.reading import Item, Reader, attempt, examples_of, quiet, readers_of
from hone.tools.data_view.text import Language, Text, said

__all__ = ["Column", "Piece", "Shown", "ShownRow", "ShownSource", "ShownText", "show"]

_REST = "passed on"
_ARGUMENTS = {
    "tools": "what the chat template shows of tools",
    "chat_template_kwargs": "variables of the chat template",
    "stop_reason": "whether the completion was cut",
    "rejected_stop_reason": "whether the rejected completion was cut",
}
"""Columns besides the roles that a run reads."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a source."""

    name: str
    kind: str
    """Its types, in words."""
    read_as: str
    example: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of adjacent tokens that are alike."""

    text: str
    is_trained: bool = False
    is_special: bool = False
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ShownText:
    """A text of a row: the prompt, or with it a completion."""

    label: str
    pieces: tuple[Piece, ...]
    num_prompt: int
    num_whole: int
    has_mask: bool
    """Whether some of it is trained."""
    note: str = ""

    @property
    def num_trained(self) -> int:
        return sum(piece.num_tokens for piece in self.pieces if piece.is_trained)


@dataclass(frozen=True, slots=True)
class ShownRow:
    """A row as a run would have it."""

    id: str
    location: str
    facts: tuple[tuple[str, str], ...]
    texts: tuple[ShownText, ...]
    problem: str = ""
    """Why a run refuses it."""


@dataclass(slots=True)
class ShownSource:
    """A source with its columns and some of its rows."""

    path: str
    key: str
    layout: str = ""
    columns: list[Column] = field(default_factory=list[Column])
    num_looked_at: int = 0
    """Rows by which the columns are described."""
    rows: list[ShownRow] = field(default_factory=list[ShownRow])
    problem: str = ""
    """Why its columns cannot be told."""


@dataclass(frozen=True, slots=True)
class Shown:
    """All sources."""

    unit: str
    note: str
    sources: tuple[ShownSource, ...]

    @property
    def has_problems(self) -> bool:
        return any(x.problem or any(row.problem for row in x.rows) for x in self.sources)


def show(viewed: Viewed, language: Language, *, first: int, number: int) -> Shown:
    """`number` rows of each source from the row `first`, counted from 1. Raises UserError for a
    source that is missing or empty, or has fewer rows than `first`."""
    with quiet():
        sources = tuple(
            _source(reader, language, first, number)
            for reader in readers_of(viewed.cfg, viewed.sources)
        )
    return Shown(language.unit, language.note, sources)


def _source(reader: Reader, language: Language, first: int, number: int) -> ShownSource:
    head: list[SourceRow] = []
    own: list[tuple[int, SourceRow, Skipped | None]] = []
    problem, is_ready = "", False
    last = first + number - 1
    problems = Problems()
    for found, numbered in reader.judged_blocks(problems):
        head += found[: HEAD_ROWS - len(head)]
        wanted = [row for _, row, why in numbered if why is None]
        if wanted and not is_ready and not problem:
            try:
                reader.take_first(wanted)
                is_ready = True
            except UserError as error:
                problem = f"{error}"
        sifted = attempt(wanted, reader.sift, problems) if is_ready else []
        left_out = {id(row): why for row, why in sifted}
        own += [
            (place, row, why or left_out.get(id(row)))
            for place, row, why in numbered
            if first <= place <= last
        ]
        if numbered and numbered[-1][0] >= last:
            break
    told = [message for kind in problems.kinds.values() for message in kind.told]
    if not head:
        raise UserError(told[0])
    if not own:
        raise UserError(
            f"{reader.source.path} has no row {first:,}"
            + (f": {told[0]}" if told else "; lower --from")
        )
    source = ShownSource(reader.source.path, reader.key, reader.layout, problem=problem)
    source.num_looked_at = len(head)
    source.columns = list(_columns(reader, head))
    if not problem:
        source.rows = [
            _row(reader, language, row, place) if why is None else _dropped(reader, row, place, why)
            for place, row, why in own
        ]
    return source


def _columns(reader: Reader, rows: Sequence[SourceRow]) -> Iterator[Column]:
    roles: dict[str, list[str]] = {}
    for role, column in reader.roles.items():
        roles.setdefault(column, []).append(role)
    names = dict.fromkeys(name for row in rows for name in row.columns)
    # A field of an object may have a role, as `reward_model.ground_truth`.
    for name in [*names, *(column for column in roles if column not in names)]:
        values = [value_of(row.columns, name) for row in rows]
        given = [value for value in values if value is not None]
        kinds = dict.fromkeys(map(kind_of, given))
        kind = " or ".join(kinds) or "nothing"
        if given and len(given) < len(values):
            kind += f", {len(values) - len(given):,} of {len(values):,} null"
        read_as = " and ".join(_of_role(reader, role, given) for role in roles.get(name, ()))
        yield Column(name, kind, read_as or _ARGUMENTS.get(name, _REST), _example(given))


def _of_role(reader: Reader, role: str, given: Sequence[Any]) -> str:
    is_dialogue = bool(given) and isinstance(given[0], list)
    if role == "prompt" and reader.layout.startswith("dialogues") and is_dialogue:
        return "prompt, and its last message the completion"
    return role


def kind_of(value: Any) -> str:
    """The type of a value in words."""
    match value:
        case bool():
            return "true or false"
        case int():
            return "whole number"
        case float():
            return "number"
        case str():
            return "text"
        case bytes():
            return "bytes"
        case list():
            if not value:
                return "empty list"
            first: Any = value[0]
            if isinstance(first, Mapping) and "role" in first:
                return "messages"
            return f"list of {_PLURALS.get(kind_of(first), kind_of(first))}"
        case Mapping():
            return f"object with {', '.join(map(str, islice(value, 6)))}"
        case None:
            return "null"
        case _:
            return type(value).__name__


_PLURALS = {"text": "texts", "whole number": "whole numbers", "number": "numbers"}


def _example(given: Sequence[Any]) -> str:
    if not given:
        return ""
    value = given[0]
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if isinstance(value, str):
        return shorten(value)
    return shorten(json.dumps(without_bytes(value), default=str, ensure_ascii=False))


def _row(reader: Reader, language: Language, row: SourceRow, number: int) -> ShownRow:
    try:
        (items,) = reader.read([row], [number])
        report = FilterReport()
        opened = language.open_images(items, report)
        entries = language.render(opened, False)
    except UserError as error:
        return ShownRow(f"{reader.name}:{number}", row.location, (), (), problem=f"{error}")
    if not opened:
        return ShownRow(
            f"{reader.name}:{number}", row.location, (), (), problem=report.unreadable[0]
        )
    texts: list[ShownText] = []
    for item, entry in zip(opened, entries, strict=True):
        broken = next((x for x in language.limits if x.length(entry) > x.max_tokens), None)
        note = "" if broken is None else f"dropped: more than {broken}"
        labels = _labels(item)
        examples = examples_of(item)
        if not language.has_tokens:
            texts += _plain(item, labels)
            continue
        texts += [
            ShownText(
                label,
                tuple(_pieces(language, text)),
                text.num_prompt,
                text.num_whole,
                has_mask=text.first_trained is not None,
                note=_note(example, note),
            )
            for label, text, example in zip(labels, entry.texts, examples, strict=True)
        ]
    return ShownRow(f"{reader.name}:{number}", row.location, tuple(_facts(opened)), tuple(texts))


def _dropped(reader: Reader, row: SourceRow, number: int, why: Skipped) -> ShownRow:
    """A row that a run leaves out before it reads it."""
    detail = why.where.removeprefix(row.location).removeprefix(": ")
    reason = ": ".join(filter(None, [f"a row with {REASONS[why.reason].of_many}", detail]))
    return ShownRow(f"{reader.name}:{number}", row.location, (("dropped", reason),), ())


def _note(example: Example, note: str) -> str:
    cut = "cut as it was sampled, so no end is trained" if example.is_truncated else ""
    return "; ".join(filter(None, [note, cut]))


def _labels(item: Item) -> list[str]:
    if isinstance(item, Example):
        return ["prompt" if item.completion is None else "demonstration"]
    if len(item.labels) > 1:
        return ["chosen", "rejected"]
    return ["good completion" if all(item.labels) else "bad completion"]


def _facts(items: Sequence[Item]) -> Iterator[tuple[str, str]]:
    first = examples_of(items[0])[0]
    yield "task", first.task
    if first.answer is not None:
        yield "answer", first.answer
    if first.given_images.values:
        yield "images", f"{len(first.given_images.values)}"
    margin = getattr(items[0], "margin", 0.0)
    if margin:
        yield "margin", f"{margin:g}"


def _plain(item: Item, labels: Sequence[str]) -> Iterator[ShownText]:
    """The texts of a row without a model: what it asks, and each completion."""
    examples = examples_of(item)
    asked = examples[0].prompt
    turns = (
        [("prompt", asked)]
        if isinstance(asked, str)
        else [(str(message["role"]), said(message.get("content"))) for message in asked]
    )
    for label, text in turns:
        yield _plain_text(label, text, is_answer=False)
    for label, example in zip(labels, examples, strict=True):
        if example.completion is not None:
            calls = example.completion.get("tool_calls")
            text = said(example.completion["content"])
            shown = f"{text}\n{json.dumps(calls, ensure_ascii=False)}" if calls else text
            yield _plain_text(label, shown, is_answer=True)


def _plain_text(label: str, text: str, *, is_answer: bool) -> ShownText:
    piece = Piece(text, is_trained=is_answer)
    return ShownText(label, (piece,), len(text), len(text), has_mask=False)


def _pieces(language: Language, text: Text) -> Iterator[Piece]:
    """The tokens of a text, adjacent ones that are alike together; each special one alone."""
    trained_from = len(text.token_ids) if text.first_trained is None else text.first_trained
    held: list[str] = []
    is_trained = False
    pieces = language.pieces(text.token_ids)
    for place, (token, piece) in enumerate(zip(text.token_ids, pieces, strict=True)):
        now = place >= trained_from
        if held and (now is not is_trained or token in language.special_ids):
            yield Piece("".join(held), is_trained, num_tokens=len(held))
            held = []
        is_trained = now
        if token in language.special_ids:
            yield Piece(piece, now, is_special=True, num_tokens=1)
        else:
            held.append(piece)
    if held:
        yield Piece("".join(held), is_trained, num_tokens=len(held))
