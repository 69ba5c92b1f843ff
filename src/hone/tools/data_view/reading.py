"""Rows of a source as the run would read them, a block at a time.

A run chooses columns, and whether pairs repeat their prompt, from all rows of a source. Here the
first block decides, so that one pass is enough; `Reader.require_settled` tells at its end whether
all rows would have decided otherwise, and then the pass begins anew with what they say.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from re import compile as pattern
from typing import TypeAlias, TypeVar

from hone.config.data_view import ViewConfig
from hone.config.tree import PairsConfig, SFTConfig
from hone.data.columns import (
    USUAL_NAMES,
    Columns,
    Example,
    ExampleReader,
    choose_columns,
    value_of,
)
from hone.data.curriculum import ROLES, column_numbers
from hone.data.pairs import (
    Compared,
    choose_pair_columns,
    map_chosen_pairs,
    single_completions,
    without_prompt,
)
from hone.data.rows import decode, json_row, parse_json
from hone.data.settings import SourceBase, SourceConfig
from hone.data.sources import SourceRow, iter_source
from hone.errors import UserError
from hone.tools.data_view.problems import Problems

__all__ = ["Item", "Reader", "attempt", "blocks", "examples_of", "quiet", "read_in_passes"]

BLOCK_ROWS = 256
Item: TypeAlias = Example | Compared
T = TypeVar("T")
V = TypeVar("V")
_LINE = pattern(r"^(.*), line (\d+): ")
_LINES = (".jsonl", ".json")


class AgainError(Exception):
    """The pass has to begin anew, since all rows say something else than the first ones."""


def examples_of(item: Item) -> tuple[Example, ...]:
    """The examples of a row: one, or the two completions of a pair."""
    return (item,) if isinstance(item, Example) else item.completions


@contextmanager
def quiet() -> Generator[None]:
    """Log nothing of the data in the block: it would be said of each block of rows."""
    logger = logging.getLogger("hone.data")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@dataclass(slots=True)
class Reader:
    """Reads the rows of one source."""

    cfg: ViewConfig
    source: SourceBase
    name: str
    key: str
    columns: Columns | dict[str, str | None] | None = None
    """Once they are chosen."""
    repeats_prompt: bool = True
    """Whether the completions of all pairs read so far begin with their prompt."""
    num_repeats: int = 0
    _witnesses: dict[str, SourceRow] = field(default_factory=dict[str, SourceRow])
    """For each column that a role may have, the first row with a value in it. A choice from these
    rows is the choice from all."""
    _unseen: dict[str, str] = field(default_factory=dict[str, str])
    """Columns without a witness so far, each with the column that a field of an object is in."""
    _first: SourceRow | None = None
    _anchor: SourceRow | None = None
    """The first row that could be read: all others must be of its kind."""

    @property
    def has_pairs(self) -> bool:
        return isinstance(self.columns, dict) and "chosen" in self.columns

    @property
    def roles(self) -> dict[str, str]:
        """Column by role."""
        if self.columns is None:
            return {}
        if isinstance(self.columns, dict):
            return {role: name for role, name in self.columns.items() if name}
        names = ("prompt", "answer", "completion", "task", "images")
        found = {role: getattr(self.columns, role) for role in names}
        if isinstance(self.source, SourceConfig):
            found |= {role: getattr(self.source.columns, role) for role in ROLES}
        return {role: name for role, name in found.items() if name}

    @property
    def layout(self) -> str:
        """The layout that the columns show, in words."""
        if isinstance(self.columns, dict):
            if not self.has_pairs:
                return "completions with a label"
            if not self.columns["prompt"]:
                return "pairs without a prompt, which is the common start of both"
            return "pairs with a prompt"
        if self.columns is None:
            return "unknown"
        if self.columns.demonstrations:
            if self.columns.completion is None:
                return "dialogues, of which the last message is to be learned"
            return "demonstrations: a prompt and what is to be learned"
        if self.columns.answer == "reward_model.ground_truth":
            return "verl's: prompts with the answer in reward_model.ground_truth"
        return "prompts" if self.columns.answer is None else "prompts with answers"

    def choose(self, rows: Sequence[SourceRow]) -> None:
        """Choose columns, by the first rows or, where these do not say it, by all. Raises UserError
        as a run would."""
        if self.columns is not None:
            return
        try:
            self.columns = self._chosen_from(rows)
        except UserError:
            with suppress(UserError):  # of a row that cannot be parsed, which is told elsewhere
                for row in iter_source(self.source):
                    self._learn(row)
            self.columns = self._chosen_from(self._witness_rows())

    def _chosen_from(self, rows: Sequence[SourceRow]) -> Columns | dict[str, str | None]:
        cfg = self.cfg
        if isinstance(cfg, PairsConfig):
            return choose_pair_columns(
                rows, self.source, is_unpaired=cfg.is_unpaired, reads_margin=cfg.for_reward_model
            )
        return choose_columns(rows, self.source, demonstrations=isinstance(cfg, SFTConfig))

    def _learn(self, row: SourceRow) -> None:
        if self._first is None:
            self._first = row
            named = self.source.columns.model_dump().values()
            usual = (name for tiers in USUAL_NAMES.values() for tier in tiers for name in tier)
            names = {*usual, *filter(None, named), *row.columns}
            self._unseen = {name: name.partition(".")[0] for name in names}
        outer = row.columns
        found = [name for name, first in self._unseen.items() if name in outer or first in outer]
        for name in found:
            if value_of(outer, name) is not None:
                self._witnesses[name] = row
                del self._unseen[name]

    def _witness_rows(self) -> list[SourceRow]:
        assert self._first is not None
        held = {id(row): row for row in (self._first, *self._witnesses.values())}
        return list(held.values())

    def require_settled(self) -> None:
        """Raise AgainError where all rows choose other columns than the first ones did, and
        UserError where they leave no choice, as a run does. To be called when all are read."""
        if self._first is None:
            return
        chosen = self._chosen_from(self._witness_rows())
        if chosen != self.columns:
            self.columns = chosen
            raise AgainError

    def read(self, rows: Sequence[SourceRow], first: int) -> list[list[Item]]:
        """What a run reads of each row: an example, or preferences. The first row has the number
        `first` in its source, counted from 1. Raises UserError as a run would."""
        assert self.columns is not None
        if isinstance(self.source, SourceConfig):
            for role in ROLES:
                column_numbers(rows, self.source, self.name, role, first=first)
        if isinstance(self.columns, dict):
            return self._pairs(rows, first, self.columns)
        anchored = [*([] if self._anchor is None else [self._anchor]), *rows]
        num_before = len(anchored) - len(rows)
        read = ExampleReader(self.source, self.columns, self.name)
        examples = read(anchored, range(first - 1 - num_before, first - 1 + len(rows)))
        self._anchor = self._anchor or rows[0]
        return [[each] for each in examples[num_before:]]

    def _pairs(
        self, rows: Sequence[SourceRow], first: int, columns: dict[str, str | None]
    ) -> list[list[Item]]:
        if self.repeats_prompt:
            shortened, repeated = without_prompt(rows, columns)
            if not repeated:
                self.repeats_prompt = False
                if self.num_repeats:
                    raise AgainError  # the rows before were read without their prompts
            else:
                self.num_repeats += len(rows)
            rows = shortened
        numbers = range(first - 1, first - 1 + len(rows))
        items = map_chosen_pairs(rows, self.source, columns, self.name, numbers)
        if isinstance(self.cfg, PairsConfig) and self.cfg.is_unpaired and self.has_pairs:
            return [[*single_completions(item)] for item in items]
        return [[item] for item in items]

    def take_first(self, rows: Sequence[SourceRow]) -> None:
        """Choose columns by the first rows, and how pairs give their prompt, for rows that are read
        one by one. Raises UserError as a run would."""
        self.choose(rows)
        if isinstance(self.columns, dict):
            self.repeats_prompt = bool(without_prompt(rows, self.columns)[1])

    def start_again(self) -> None:
        """Forget the rows, and keep what was learned of them."""
        self._witnesses, self._first, self._anchor, self.num_repeats = {}, None, None, 0

    def blocks(self, problems: Problems) -> Iterator[tuple[int, list[SourceRow]]]:
        """Rows in blocks, each with the number of its first row. A row that cannot be parsed is
        added to the problems; reading goes on after it where that is possible."""
        rows = self._rows(problems)
        first = 1
        while block := list(islice(rows, BLOCK_ROWS)):
            for row in block:
                self._learn(row)
            yield first, block
            first += len(block)

    def _rows(self, problems: Problems) -> Iterator[SourceRow]:
        num_read = 0
        try:
            for row in iter_source(self.source):
                num_read += 1
                yield row
        except UserError as error:
            problems.add(f"{error}")
            found = _LINE.match(f"{error}")
            path = Path(found[1]) if found else None
            if found is None or path is None or not _is_whole_source(path, self.source):
                if num_read:
                    problems.stopped.append(f"{self.source.path}, after {num_read:,} rows")
                return
            most = self.source.max_rows
            rest = _lines_after(path, int(found[2]), problems)
            yield from islice(rest, None if most is None else max(most - num_read - 1, 0))


def _is_whole_source(path: Path, source: SourceBase) -> bool:
    """Whether a file of JSON lines is all that a source has."""
    return path.suffix in _LINES and path == Path(source.path).expanduser() and path.is_file()


def _lines_after(path: Path, number: int, problems: Problems) -> Iterator[SourceRow]:
    """The rows of JSON lines after the line `number`, which cannot be parsed."""
    with path.open("rb") as file:
        for line_number, line in enumerate(file, start=1):
            if line_number <= number or line.isspace():
                continue
            location = f"{path}, line {line_number}"
            try:
                yield json_row(parse_json(decode(line, location), location), location, path.parent)
            except UserError as error:
                problems.add(f"{error}")


def read_in_passes(
    readers: Sequence[Reader], begin: Callable[[], None], read: Callable[[Reader], None]
) -> bool:
    """Call `read` with each reader, and all over again where one raises AgainError; `begin` forgets
    what an earlier pass has found. Returns False where Ctrl-C has ended it."""
    try:
        with quiet():
            begin()
            while not _is_read(readers, read):
                for reader in readers:
                    reader.start_again()
                begin()
    except KeyboardInterrupt:
        return False
    return True


def _is_read(readers: Sequence[Reader], read: Callable[[Reader], None]) -> bool:
    """One pass. False where it has to begin anew."""
    try:
        for reader in readers:
            read(reader)
    except AgainError:
        return False
    return True


def blocks(
    reader: Reader, problems: Problems
) -> Iterator[tuple[list[SourceRow], list[tuple[SourceRow, list[Item]]]]]:
    """Blocks of rows, each with those that can be read and what a run would read of them; what
    cannot be read is added to the problems. Raises AgainError."""
    for first, rows in reader.blocks(problems):
        try:
            reader.choose(rows)
        except UserError as error:
            problems.add(f"{error}")
            problems.stopped.append(f"{reader.source.path}: its columns are not known")
            return
        numbered = list(enumerate(rows, first))
        done = attempt(
            numbered,
            lambda some: reader.read([row for _, row in some], some[0][0]),
            problems,
        )
        yield rows, [(row, items) for (_, row), items in done]
    try:
        reader.require_settled()
    except UserError as error:
        problems.add(f"{error}")


def attempt(
    values: Sequence[V], work: Callable[[Sequence[V]], Sequence[T]], problems: Problems
) -> list[tuple[V, T]]:
    """Each value with what `work` makes of it. Where it refuses some, they are found one by one and
    added to the problems."""
    if not values:
        return []
    try:
        return list(zip(values, work(values), strict=True))
    except UserError:
        pass
    done: list[tuple[V, T]] = []
    for value in values:
        try:
            done += zip([value], work([value]), strict=True)
        except UserError as error:
            problems.add(f"{error}")
    return done
