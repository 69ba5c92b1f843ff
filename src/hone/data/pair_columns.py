"""The columns of preferences, and whether their completions begin with the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

from hone.data.columns import choose_column, value_of
from hone.data.missing import is_silent, nothing_in
from hone.data.settings import SourceBase
from hone.data.sources import SourceRow

__all__ = [
    "NAMES",
    "STOP_REASONS",
    "PairColumns",
    "choose_pair_columns",
    "common_start",
    "without_prompt",
]

NAMES = ("chosen", "rejected")
STOP_REASONS = ("stop_reason", "rejected_stop_reason")
"""Columns that say whether a completion was cut, of the better and of the worse one."""
_NOUNS = {name: f"{name} completion" for name in NAMES} | {"completion": "completion"}


@dataclass(frozen=True)
class PairColumns:
    """The column of each role, as `choose_pair_columns` chooses them."""

    by_role: Mapping[str, str | None]
    repeats: bool = False
    """Whether completions begin with the prompt."""

    @classmethod
    def settled(
        cls,
        rows: Sequence[SourceRow],
        by_role: Mapping[str, str | None],
        which: str = "",
        *,
        drops_missing: bool,
    ) -> tuple[PairColumns, list[str]]:
        """The columns, once rows have shown whether all repeat their prompts, and a warning if they
        do. With `drops_missing` completions that say nothing show nothing."""
        if drops_missing:
            rows = [row for row in rows if cls(by_role).missing(row) is None]
        shortened, repeated = without_prompt(rows, by_role, which) if rows else (rows, [])
        return cls(by_role, repeats=shortened is not rows), repeated

    @property
    def content_columns(self) -> Sequence[str]:
        """Columns of which the content of a row consists, besides that of the images."""
        named = [name for role, name in self.by_role.items() if name and role != "images"]
        return [*named, *STOP_REASONS]

    @property
    def images_column(self) -> str | None:
        """The column of the images, if there is one."""
        return self.by_role.get("images")

    def missing(self, row: SourceRow) -> str | None:
        """Why a completion of a row says nothing, with its place; None where none does."""
        roles = {role: self.by_role[role] for role in _NOUNS if self.by_role.get(role)}
        values = {role: value_of(row.columns, name) for role, name in roles.items()}
        texts = [value for value in values.values() if isinstance(value, str)]
        start = 0
        if self.repeats:
            prompt = value_of(row.columns, self.by_role["prompt"])
            has_start = isinstance(prompt, str) and all(text.startswith(prompt) for text in texts)
            start = len(prompt) if has_start else 0
        elif len(texts) == 2 and self.by_role["prompt"] is None:
            start = common_start(*texts)
        for role, value in values.items():
            if is_silent(value[start:] if isinstance(value, str) else value):
                return nothing_in(row, roles[role], _NOUNS[role])
        return None


def choose_pair_columns(
    rows: Sequence[SourceRow], source: SourceBase, *, is_unpaired: bool, reads_margin: bool
) -> dict[str, str | None]:
    """The column of each role: the roles of pairs, or those of completions with labels. Raises
    UserError where a role has no column, or several columns fit it."""
    choose = partial(choose_column, rows, source)
    prompt = choose("prompt", required=False)
    if prompt == "messages" and source.columns.prompt is None:
        prompt = None  # in many data sets `messages` is the prompt and the chosen completion
    columns = {"prompt": prompt}
    columns |= {role: choose(role, required=not is_unpaired) for role in NAMES}
    has_pairs = None not in (columns["chosen"], columns["rejected"])
    if not has_pairs:
        columns = {"prompt": prompt or "prompt"}
        columns |= {role: choose(role) for role in ("completion", "label")}
    elif reads_margin:
        columns["margin"] = choose("margin", required=False)
    return columns | {"images": choose("images", required=False)}


def without_prompt(
    rows: Sequence[SourceRow], columns: Mapping[str, str | None], which: str = ""
) -> tuple[Sequence[SourceRow], list[str]]:
    """The rows without a repetition of the prompt in their completions, and a warning if there was
    one: a repeated prompt would also be trained as a completion. The prompt counts as repeated only
    if all completions of the source begin with it, since a single answer to `Hi` may do so by
    chance."""
    names = [column for role in (*NAMES, "completion") if (column := columns.get(role))]
    shortened: list[SourceRow] = []
    for row in rows:
        prompt, *texts = (value_of(row.columns, name) for name in (columns["prompt"], *names))
        if not isinstance(prompt, str) or not prompt.strip():
            return rows, []
        if not all(isinstance(text, str) and text.startswith(prompt) for text in texts):
            return rows, []
        rest = {name: text[len(prompt) :] for name, text in zip(names, texts, strict=True)}
        shortened.append(replace(row, columns={**row.columns, **rest}))
    what = f"{' and '.join(names)} of all {which}{len(rows):,} rows begin with the prompt"
    return shortened, [f"{what}, which is taken off them"]


def common_start(chosen: str, rejected: str) -> int:
    """The length of the common start of two texts, in characters. It ends before a word or number
    that continues differently, and before the space in front of it."""
    pairs = zip(chosen, rejected, strict=False)
    length = sum(1 for _ in takewhile(lambda both: both[0] == both[1], pairs))
    if any(text[length : length + 1].isalnum() for text in (chosen, rejected)):
        while length and chosen[length - 1].isalnum():
            length -= 1
    return length - 1 if length and chosen[length - 1] == " " else length
