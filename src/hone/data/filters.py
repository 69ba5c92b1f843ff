"""The length filter, with a report of all rows that are dropped, and words for why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from hone.data.row_source import Skipped
from hone.errors import UserError
from hone.model_input import ModelInput

__all__ = [
    "REASONS",
    "DroppedRow",
    "FilterReport",
    "LengthLimit",
    "Located",
    "Reason",
    "filter_length",
    "too_long",
]


@dataclass(frozen=True, slots=True)
class Reason:
    """Why rows are dropped, for messages."""

    of_one: str
    """As a clause: `it is too long`."""
    of_many: str
    """Behind `rows with`, with the key that decides."""


REASONS = {
    "filter": Reason("data.filter returns false for it", "false from data.filter"),
    "missing_answer": Reason("it has no answer", "no answer (data.missing_answers is drop)"),
    "duplicate": Reason(
        "an earlier row has the same content",
        "the content of an earlier row (data.duplicates is drop)",
    ),
    "too_long": Reason("it is too long", "more tokens than a limit"),
    "image": Reason(
        "an image of it cannot be read", "an image that cannot be read (data.image_errors is drop)"
    ),
}
"""By the name of `Skipped.reason`. Rows that are held out are skipped on purpose."""


class Located(Protocol):
    """A row before it is rendered."""

    @property
    def id(self) -> str: ...

    @property
    def location(self) -> str:
        """File and line, for messages."""
        ...


class RenderedRow(Protocol):
    @property
    def prompt_ids(self) -> Sequence[int]:
        """Ids of the prompt, by which rows that repeat a prompt are recognised."""
        ...

    @property
    def model_input(self) -> ModelInput:
        """Inputs besides these ids; rows that differ in them are different prompts."""
        ...

    @property
    def is_cut(self) -> bool:
        """Whether only its beginning was tokenised, which exceeds a limit."""
        ...


E = TypeVar("E", bound=Located)
T = TypeVar("T", bound=RenderedRow)


@dataclass(frozen=True, slots=True)
class LengthLimit(Generic[T]):
    """The most tokens a row may have."""

    name: str
    """The configuration key, for messages."""
    max_tokens: int
    length: Callable[[T], int]
    """The length of a rendered row that is limited, in tokens."""

    def __str__(self) -> str:
        return f"{self.name} = {self.max_tokens}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedRow:
    """A row that was too long."""

    id: str
    location: str
    num_tokens: int
    limit: str
    """The limit that it exceeds, for messages."""
    is_cut: bool
    """Only its beginning was tokenised, so it has at least `num_tokens`."""

    @property
    def length(self) -> str:
        """The number of its tokens, for messages."""
        return f"at least {self.num_tokens}" if self.is_cut else str(self.num_tokens)


@dataclass(slots=True)
class FilterReport:
    """The rows of all sources that are read whole: how many there are, and which are dropped."""

    num_rows: int = 0
    """Rows that the length filter has read."""
    longest_tokens: int = 0
    """The longest row that was kept."""
    dropped: list[DroppedRow] = field(default_factory=list[DroppedRow])
    unreadable: list[str] = field(default_factory=list[str])
    """Rows that were dropped before, with the image that cannot be read, as messages."""
    skipped: Counter[str] = field(default_factory=Counter[str])
    """Rows that were dropped before they were rendered, by reason."""
    first_skipped: dict[str, str] = field(default_factory=dict[str, str])
    """The first one of each reason, as a message."""

    @property
    def num_kept(self) -> int:
        return self.num_rows - len(self.dropped)

    @property
    def has_dropped(self) -> bool:
        """Whether any row was dropped."""
        return bool(self.dropped or self.unreadable or self.skipped)

    def skip(self, row: Skipped) -> None:
        """Count a row that is dropped before it is rendered."""
        self.skipped[row.reason] += 1
        self.first_skipped.setdefault(row.reason, row.where)

    def add_skipped(self, other: FilterReport) -> None:
        """Add the rows that are dropped before they are rendered, of another report."""
        self.skipped.update(other.skipped)
        self.first_skipped = other.first_skipped | self.first_skipped

    @property
    def skipped_in_words(self) -> list[str]:
        """The number of rows of each reason, with the first one."""
        return [
            f"{number:,} dropped with {REASONS[reason].of_many}: {self.first_skipped[reason]}"
            for reason, number in self.skipped.items()
        ]

    def summary(self, num_trained: int, num_listed: int = 5) -> str:
        """One line for the log, with the first dropped rows. `num_trained` of the kept rows are to
        train on, all others for evaluation. Streamed rows are not counted here."""
        num_read = self.num_rows + len(self.unreadable) + self.skipped.total()
        text = f"{self.num_kept:,} of {num_read:,} rows kept"
        if num_held_out := self.num_kept - num_trained:
            parts = f" ({num_trained:,} to train on, {num_held_out:,} held out)"
            text += parts if num_trained else " for evaluation"
        text += f", longest {self.longest_tokens:,} tokens"
        text = "; ".join([text, *self.skipped_in_words])
        if self.unreadable:
            text += f"; {len(self.unreadable):,} dropped for an image: {self.unreadable[0]}"
        if not self.dropped:
            return text
        listed = [f"{row.location} ({row.length})" for row in self.dropped[:num_listed]]
        if len(self.dropped) > num_listed:
            listed.append("...")
        return f"{text}; dropped as too long: {'; '.join(listed)}"


def too_long(
    example: Located,
    row: T,
    limits: Sequence[LengthLimit[T]],
    *,
    overlong: Literal["drop", "error"],
) -> DroppedRow | None:
    """The row if it exceeds one of the limits. Raises UserError where that is an error."""
    broken = next((x for x in limits if x.length(row) > x.max_tokens), None)
    if broken is None:
        return None
    lost = DroppedRow(
        id=example.id,
        location=example.location,
        num_tokens=broken.length(row),
        limit=str(broken),
        is_cut=row.is_cut,
    )
    if overlong == "error":
        raise UserError(
            f"{lost.location}: {lost.length} tokens{_of_images(row)}, but {lost.limit}; raise the "
            "limit, shorten the row, or set data.overlong_prompts to 'drop'"
        )
    return lost


def filter_length(
    examples: Sequence[E],
    rows: Sequence[T],
    limits: Sequence[LengthLimit[T]],
    *,
    overlong: Literal["drop", "error"],
    report: FilterReport,
) -> list[tuple[E, T]]:
    """The rows of one source that are within all limits; others are added to the report. The last
    limit must be that of the whole row.

    Raises UserError where longer rows are errors, or no row is left.
    """
    kept: list[tuple[E, T]] = []
    dropped: list[DroppedRow] = []
    for example, row in zip(examples, rows, strict=True):
        lost = too_long(example, row, limits, overlong=overlong)
        if lost is not None:
            dropped.append(lost)
            continue
        kept.append((example, row))
        report.longest_tokens = max(report.longest_tokens, limits[-1].length(row))
    if not kept:
        shortest = min(dropped, key=lambda row: row.num_tokens)
        raise UserError(
            f"all {len(rows)} rows are too long; the shortest, {shortest.location}, has "
            f"{shortest.length} tokens, but {shortest.limit}"
        )
    report.num_rows += len(rows)
    report.dropped.extend(dropped)
    return kept


def _of_images(row: RenderedRow) -> str:
    """How many tokens of a row are those of images, for messages; empty without any."""
    number = sum(content.num_tokens for content in row.model_input.contents)
    return f", {number} of them of images" if number else ""
