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
from functools import cached_property
from itertools import islice
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
from hone.data.pair_columns import PairColumns, choose_pair_columns, without_prompt
from hone.data.pairs import (
    Compared,
    map_chosen_pairs,
    single_completions,
)
from hone.data.row_filters import InFileOrder, Keep, Sieve, load_filter, passing
from hone.data.row_source import Skipped
from hone.data.settings import SourceBase, SourceConfig
from hone.data.sources import SourceRow, iter_source
from hone.errors import UserError
from hone.tools.data_view.problems import Problems

__all__ = [
    "Block",
    "Item",
    "Reader",
    "attempt",
    "blocks",
    "examples_of",
    "quiet",
    "read_in_passes",
    "readers_of",
]

BLOCK_ROWS = 256
Item: TypeAlias = Example | Compared
T = TypeVar("T")
V = TypeVar("V")
_ROW = pattern(r"^.*, (line|row) \d+: ")
"""Begin of a message on one row; others are on a file, whose rest is not read."""


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
class Block:
    """Some rows of a source, one after another."""

    rows: list[SourceRow] = field(default_factory=list[SourceRow])
    """Those that can be parsed."""
    skipped: list[Skipped] = field(default_factory=list[Skipped])
    """What leaves rows out before they are read."""
    left: list[SourceRow] = field(default_factory=list[SourceRow])
    """All others."""
    read: list[tuple[SourceRow, list[Item]]] = field(
        default_factory=list[tuple[SourceRow, list[Item]]]
    )
    """Those of them that can be read, with what a run would read of them."""


@dataclass
class Reader:
    """Reads the rows of one source."""

    cfg: ViewConfig
    source: SourceBase
    name: str
    key: str
    keep: Keep | None = None
    """The user's function of a row."""
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
                    if self.keep is None or self.keep(row):
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

    @property
    def content_columns(self) -> Sequence[str]:
        """Columns of which the content of a row consists, besides that of the images."""
        return self._answers.content_columns

    @property
    def images_column(self) -> str | None:
        """The column of the images, if there is one."""
        return self._answers.images_column

    def missing(self, row: SourceRow) -> str | None:
        """Why a row has no answer, with its place. Raises UserError as a run would."""
        return self._answers.missing(row)

    @property
    def _answers(self) -> PairColumns | ExampleReader:
        if isinstance(self.columns, dict):
            return PairColumns(self.columns, self.repeats_prompt)
        return self._example_reader

    @cached_property
    def _example_reader(self) -> ExampleReader:
        assert isinstance(self.columns, Columns)
        return ExampleReader(self.source, self.columns, self.name)

    @cached_property
    def _in_file_order(self) -> InFileOrder:
        return InFileOrder(Sieve(self.cfg.data, self, None))

    def sift(self, rows: Sequence[SourceRow]) -> list[Skipped | None]:
        """What leaves each row out, of those that the user's function wants. These rows follow
        those of the calls before. Raises UserError as a run would."""
        if isinstance(self.columns, dict) and self.cfg.data.missing_answers == "drop":
            columns = PairColumns(self.columns)
            complete = [row for row in rows if columns.missing(row) is None]
            self._settle_repeats(complete, self.columns)
        return self._in_file_order(rows)

    def read(self, rows: Sequence[SourceRow], numbers: Sequence[int]) -> list[list[Item]]:
        """What a run reads of each row: an example, or preferences. The numbers are those of the
        rows in their source, counted from 1. Raises UserError as a run would."""
        assert self.columns is not None
        if isinstance(self.source, SourceConfig):
            for role in ROLES:
                column_numbers(rows, [n - 1 for n in numbers], self.source, self.name, role)
        if isinstance(self.columns, dict):
            return self._pairs(rows, numbers, self.columns)
        anchored = [*([] if self._anchor is None else [self._anchor]), *rows]
        num_before = len(anchored) - len(rows)
        read = ExampleReader(self.source, self.columns, self.name)
        examples = read(anchored, [0] * num_before + [number - 1 for number in numbers])
        self._anchor = self._anchor or rows[0]
        return [[each] for each in examples[num_before:]]

    def _pairs(
        self, rows: Sequence[SourceRow], numbers: Sequence[int], columns: dict[str, str | None]
    ) -> list[list[Item]]:
        rows = self._settle_repeats(rows, columns)
        self.num_repeats += len(rows) * self.repeats_prompt
        counted = [number - 1 for number in numbers]
        items = map_chosen_pairs(rows, self.source, columns, self.name, counted)
        if isinstance(self.cfg, PairsConfig) and self.cfg.is_unpaired and self.has_pairs:
            return [[*single_completions(item)] for item in items]
        return [[item] for item in items]

    def _settle_repeats(
        self, rows: Sequence[SourceRow], columns: dict[str, str | None]
    ) -> Sequence[SourceRow]:
        """The rows without their prompts, if all rows so far repeat them."""
        if not self.repeats_prompt or not rows:
            return rows
        shortened, repeated = without_prompt(rows, columns)
        if not repeated:
            self.repeats_prompt = False
            if self.num_repeats:
                raise AgainError  # the rows before were read without their prompts
        return shortened

    def take_first(self, rows: Sequence[SourceRow]) -> None:
        """Choose columns by the first rows, and how pairs give their prompt, for rows that are read
        one by one. Raises UserError as a run would."""
        self.choose(rows)
        if isinstance(self.columns, dict):
            drops_missing = self.cfg.data.missing_answers == "drop"
            settled, _ = PairColumns.settled(rows, self.columns, drops_missing=drops_missing)
            self.repeats_prompt = settled.repeats

    def start_again(self) -> None:
        """Forget the rows, and keep what was learned of them."""
        self._witnesses, self._first, self._anchor, self.num_repeats = {}, None, None, 0
        for name in ("_in_file_order", "_example_reader"):
            self.__dict__.pop(name, None)

    def judged_blocks(
        self, problems: Problems
    ) -> Iterator[tuple[list[SourceRow], list[tuple[int, SourceRow, Skipped | None]]]]:
        """Blocks of rows as they are in the files, and of each block the rows that the user's
        function has judged: the number in the source, counted from 1, the row, and what leaves it
        out or None. A row that cannot be parsed, or for which the function fails, is added to the
        problems; reading goes on after it where that is possible."""
        rows = self._rows(problems)
        first = 1
        while found := list(islice(rows, BLOCK_ROWS)):
            numbered = list(enumerate(found, first))
            first += len(found)
            judged = attempt(
                numbered, lambda some: passing(self.keep, [row for _, row in some]), problems
            )
            for (_, row), why in judged:
                if why is None:
                    self._learn(row)
            yield found, [(number, row, why) for (number, row), why in judged]

    def _rows(self, problems: Problems) -> Iterator[SourceRow]:
        num_read = 0

        def bad(error: UserError) -> None:
            problems.add(f"{error}")
            if not _ROW.match(f"{error}"):
                problems.stopped.append(f"{self.source.path}, after {num_read:,} rows")

        try:
            for row in iter_source(self.source, bad):
                num_read += 1
                yield row
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


def readers_of(cfg: ViewConfig, sources: Sequence[tuple[SourceBase, str, str]]) -> list[Reader]:
    """Readers of sources, each with its name and its key. Raises UserError where the function of
    `data.filter` cannot be imported."""
    keep = load_filter(cfg.data.filter)
    return [Reader(cfg, *source, keep=keep) for source in sources]


def blocks(reader: Reader, problems: Problems) -> Iterator[Block]:
    """Blocks of the rows of a source, read as a run reads them; what cannot be read is added to the
    problems. Raises AgainError."""
    for rows, numbered in reader.judged_blocks(problems):
        block = Block(rows, [why for _, _, why in numbered if why is not None])
        wanted = [(number, row) for number, row, why in numbered if why is None]
        if not wanted:
            yield block
            continue
        try:
            reader.choose([row for _, row in wanted])
        except UserError as error:
            problems.add(f"{error}")
            problems.stopped.append(f"{reader.source.path}: its columns are not known")
            return
        sifted = attempt(wanted, lambda some: reader.sift([row for _, row in some]), problems)
        block.skipped += [why for _, why in sifted if why is not None]
        left = [each for each, why in sifted if why is None]
        block.left = [row for _, row in left]
        done = attempt(
            left,
            lambda some: reader.read([row for _, row in some], [number for number, _ in some]),
            problems,
        )
        block.read = [(row, items) for (_, row), items in done]
        yield block
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
