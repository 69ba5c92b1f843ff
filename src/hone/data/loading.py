"""The rows of a run: read, filtered, rendered, filtered by length, split into training and
evaluation.

By its size, a source is read whole before the run, or row by row as the run draws from it
(`hone.data.streamed`); the order of its rows is the same where a window holds them all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from hone.data.curriculum import ROLES, Role, column_numbers
from hone.data.filters import (
    FilterReport,
    LengthLimit,
    Located,
    RenderedRow,
    filter_length,
    too_long,
)
from hone.data.images import WithImages, open_images
from hone.data.index import MAX_OPEN_BYTES, SourceIndex
from hone.data.items import RowsOfItems
from hone.data.order import Window
from hone.data.phases import Limits
from hone.data.row_filters import (
    InFileOrder,
    Keep,
    ReadColumns,
    Sieve,
    first_wanted,
    load_filter,
    passing,
    split,
)
from hone.data.row_source import Item, RowSource, Skipped
from hone.data.settings import DataConfig, SourceBase, SourceConfig
from hone.data.sources import SourceRow, read_source, source_names
from hone.data.split import Data, is_held_out
from hone.data.stream import Stream
from hone.data.streamed import TOGETHER_ROWS, StreamedRows
from hone.errors import UserError
from hone.model_input import prompt_digest

if TYPE_CHECKING:
    from hone.images.reader import ImageReader

__all__ = [
    "WHOLE_BYTES",
    "WHOLE_ROWS",
    "WINDOW",
    "Readers",
    "RowReader",
    "is_streamed",
    "load_data",
    "require_no_order",
]

logger = logging.getLogger(__name__)

WHOLE_ROWS, WHOLE_BYTES = 50_000, 64 << 20
"""A source of at most so many rows, and bytes unpacked, is read before the run: to render so many
prompts takes some ten seconds. A larger one is read while the run draws from it."""
KEPT_BYTES = 16 << 20
"""The index of a source is kept in the run folder if its files have so many bytes together."""
WINDOW = Window(rows=65_536, bytes=16 << 20)
"""What is shuffled together, where `data.shuffle_window` is unset."""


class GivenRow(Located, WithImages, Protocol):
    """A row before it is rendered, which may have images."""


E = TypeVar("E", bound=GivenRow)
R = TypeVar("R", bound=RenderedRow)
T = TypeVar("T", bound=Item)
E_co = TypeVar("E_co", bound=GivenRow, covariant=True)


class RowReader(ReadColumns, Protocol[E_co]):
    """Makes examples of rows of one source."""

    @property
    def item_names(self) -> Sequence[str]:
        """Names of the items that each row has, which their ids end with; of a row that is one item
        a single empty one."""
        ...

    def __call__(self, rows: Sequence[SourceRow], numbers: Sequence[int], /) -> Sequence[E_co]:
        """Examples of the items with these numbers, counted from 0, from the row of each. Raises
        UserError."""
        ...


class Readers(Protocol[E_co]):
    """How the rows of a source become examples, whose ids begin with its name."""

    def by_all(
        self, rows: Sequence[SourceRow], source: SourceBase, name: str, /
    ) -> RowReader[E_co]:
        """The reader of a source of which these are all rows; it is called once, with all of them
        that are not left out. Raises UserError."""
        ...

    def by_first(
        self, rows: Sequence[SourceRow], source: SourceBase, name: str, /
    ) -> RowReader[E_co]:
        """The reader of a source of which these rows are the first. Raises UserError."""
        ...


def load_data(
    cfg: DataConfig,
    *,
    readers: Readers[E],
    render: Callable[[Sequence[E]], Sequence[R]],
    limits: Sequence[LengthLimit[R]],
    make: Callable[[E, R], T],
    content: Callable[[T], object],
    seed: int,
    images: ImageReader | None = None,
    cache: Path | None = None,
) -> Data[T]:
    """Load all sources, and split their rows into training and evaluation.

    `readers` make examples of the rows of a source, `images` opens their images (None: the model
    reads text alone), `render` renders them, rows beyond the `limits` are dropped, and `make`
    builds the items. `content` is the part of an item by which `Stream` recognises the data.
    `cache` is a folder for indexes of sources, which the processes of a host share.

    Raises UserError for anything wrong with the data, and where a source has no training row left
    or `eval_fraction` holds out no row.
    """
    if not cfg.train and not cfg.eval:
        raise UserError("no data: name at least one source in data.train")
    keep = load_filter(cfg.filter)
    loader = _Loader(cfg, readers, render, limits, make, seed, images, cache, keep)
    names = source_names([*cfg.train, *cfg.eval])
    train = [loader.train(source, name) for source, name in zip(cfg.train, names, strict=False)]
    evaluation = [
        row
        for source, name in zip(cfg.eval, names[len(cfg.train) :], strict=True)
        for row in loader.whole(source, name, read_source(source))
    ]
    if cfg.held_out_fraction:
        train, evaluation = loader.split(train)
    report = loader.report
    if report.num_rows or report.has_dropped:
        level = logging.WARNING if report.has_dropped else logging.INFO
        num_trained = sum(len(rows) for rows in train if not isinstance(rows, RowSource))
        logger.log(level, "%s", report.summary(num_trained))
    stream = Stream(
        train,
        seed=seed,
        weights=[source.weight for source in cfg.train],
        limits=[Limits(x.from_step, x.until_step, x.max_epochs) for x in cfg.train],
        names=names[: len(train)],
        shuffle=cfg.shuffle,
        content=content,
        column_values=loader.column_values,
    )
    return Data(stream, evaluation, report)


@dataclass
class _Loader(Generic[E, R, T]):
    """Makes the rows of a run from those of its sources."""

    cfg: DataConfig
    readers: Readers[E]
    render: Callable[[Sequence[E]], Sequence[R]]
    limits: Sequence[LengthLimit[R]]
    make: Callable[[E, R], T]
    seed: int
    images: ImageReader | None
    cache: Path | None
    keep: Keep | None
    """The user's function of a row."""
    report: FilterReport = field(default_factory=FilterReport)
    held_out: list[T] = field(default_factory=list[T])
    """Rows of streamed sources that are for evaluation."""
    column_values: dict[Role, dict[str, float]] = field(
        default_factory=lambda: {role: {} for role in ROLES}
    )
    """Difficulties and pass rates of training rows by id, of sources that have a column of them."""
    _held_out_ids: set[str] = field(default_factory=set[str])
    _prompts: set[bytes] = field(default_factory=set[bytes])

    def train(self, source: SourceConfig, name: str) -> list[T] | StreamedRows[T]:
        """A source to train on, whole or streamed. Raises UserError."""
        index = SourceIndex.build(source, self.cache, least_kept_bytes=KEPT_BYTES)
        if not is_streamed(self.cfg, index):
            return self.whole(source, name, index.all_rows(), trains=True)
        require_no_order(source)
        largest = int(index.sizes.num_bytes.max())
        if largest > MAX_OPEN_BYTES:
            raise UserError(
                f"{source.path}: {largest >> 20:,} MiB of rows can only be read at once, and at "
                f"most {MAX_OPEN_BYTES >> 20} are kept in memory. Write Parquet with smaller row "
                "groups (pyarrow.parquet.write_table(..., row_group_size=10_000)), and a JSON "
                "array as JSON lines"
            )
        return self._streamed(index, source, name)

    def whole(
        self, source: SourceBase, name: str, found: Sequence[SourceRow], *, trains: bool = False
    ) -> list[T]:
        """The rows of a source, of all that were `found` in it, that no filter leaves out. With
        `trains` the values of `column_values` are read too. Raises UserError."""
        rows, numbers = self._filtered(source, found, passing(self.keep, found), range(len(found)))
        read = self.readers.by_all(rows, source, name)
        skipped = InFileOrder(Sieve(self.cfg, read, None))(rows)
        left, numbers = self._filtered(source, rows, skipped, numbers)
        roles: Sequence[Role] = ROLES if trains else ()
        said: dict[Role, list[float]] = {
            role: list(column_numbers(left, numbers, source, name, role).values()) for role in roles
        }
        given = read(left, numbers)
        for role, values in said.items():
            # A row of which several items were made says the same of each.
            per_row = len(given) // max(len(values), 1)
            self.column_values[role] |= {
                row.id: values[place // per_row] for place, row in enumerate(given) if values
            }
        examples = open_images(given, self.images, self.cfg, self.report)
        if given and not examples:
            raise UserError(
                f"{source.path}: none of the {len(given)} rows has images that can be read; the "
                f"first: {self.report.unreadable[-len(given)]}. Mend the images, or remove the "
                "source"
            )
        rendered = self.render(examples)
        # Before the length filter: a changed limit must not move a prompt to the other split.
        if self.cfg.held_out_fraction:
            for example, row in zip(examples, rendered, strict=True):
                self._prompts.add(prompt_digest(row.prompt_ids, row.model_input))
                if self._is_held_out(row):
                    self._held_out_ids.add(example.id)
        kept = filter_length(
            examples, rendered, self.limits, overlong=self.cfg.overlong_prompts, report=self.report
        )
        return [self.make(example, row) for example, row in kept]

    def _filtered(
        self,
        source: SourceBase,
        rows: Sequence[SourceRow],
        skipped: Sequence[Skipped | None],
        numbers: Sequence[int],
    ) -> tuple[list[SourceRow], list[int]]:
        """Rows of a source that nothing skips, with their numbers. Raises UserError where none is
        left."""
        report = FilterReport()
        kept = split(rows, numbers, skipped, report)
        if rows and not kept[0]:
            raise _none_left(source, len(rows), report)
        self.report.add_skipped(report)
        return kept

    def split(
        self, sources: Sequence[list[T] | StreamedRows[T]]
    ) -> tuple[list[list[T] | StreamedRows[T]], list[T]]:
        """The training rows of each source, and all rows that are held out. Raises UserError."""
        evaluation, kept = list(self.held_out), list[list[T] | StreamedRows[T]]()
        num_rows = sum(len(rows) for rows in sources if not isinstance(rows, RowSource))
        together = ""
        if len(self._prompts) < num_rows:
            together = (
                f". Rows of a prompt stay together, and there are {len(self._prompts)} prompts in "
                "all"
            )
        for source, rows in zip(self.cfg.train, sources, strict=True):
            if isinstance(rows, RowSource):
                kept.append(rows)
                continue
            evaluation += [row for row in rows if row.id in self._held_out_ids]
            rest = [row for row in rows if row.id not in self._held_out_ids]
            kept.append(rest)
            if not rest:
                raise UserError(
                    f"data.eval_fraction = {self.cfg.eval_fraction} leaves none of the {len(rows)} "
                    f"rows of {source.path} for training; lower it or name a data.eval source"
                    f"{together}"
                )
        if not evaluation:
            raise UserError(
                f"data.eval_fraction = {self.cfg.eval_fraction} holds out none of {num_rows} rows; "
                f"raise it or name a data.eval source{together}"
            )
        return kept, evaluation

    def _streamed(self, rows: SourceIndex, source: SourceConfig, name: str) -> StreamedRows[T]:
        read = self.readers.by_first(self._first_wanted(rows, source), source, name)
        names = read.item_names
        made = StreamedRows(
            rows if len(names) == 1 else RowsOfItems(rows, len(names)),
            partial(self._prepare, read),
            name=name,
            seed=self.seed,
            shuffle=self.cfg.shuffle,
            window=Window(rows=self.cfg.shuffle_window) if self.cfg.shuffle_window else WINDOW,
            item_names=names,
            sieve=Sieve(self.cfg, read, self.keep),
            # What reads images has processes and caches of its own, for the thread of the run.
            in_thread=self.images is None,
        )
        logger.info(
            "%s: %s rows, read as they are drawn%s", source.path, f"{made.num_rows:,}", made.windows
        )
        if self.cfg.held_out_fraction:
            self._hold_out(made, read, source)
        return made

    def _first_wanted(self, rows: SourceIndex, source: SourceConfig) -> list[SourceRow]:
        """First rows of a source, of those that the user's function wants. Raises UserError where
        it wants none."""
        some_at_a_time = (
            rows.rows(block, range(start, min(start + TOGETHER_ROWS, num_rows)))
            for block, num_rows in enumerate(rows.sizes.num_rows.tolist())
            for start in range(0, num_rows, TOGETHER_ROWS)
        )
        report = FilterReport()
        found = first_wanted(self.keep, some_at_a_time, report)
        if not found:
            raise _none_left(source, rows.num_rows, report)
        return found

    def _hold_out(
        self,
        rows: StreamedRows[T],
        read: Callable[[Sequence[SourceRow], Sequence[int]], Sequence[E]],
        source: SourceConfig,
    ) -> None:
        """Read a source from its beginning until `data.max_eval_rows` rows for evaluation are
        found."""
        found: list[T] = []
        num_read = 0
        for num_so_far, some in rows.walk(partial(self._prepare, read, held_out=True)):
            found += some
            num_read = num_so_far
            if len(found) >= self.cfg.max_eval_rows:
                break
        del found[self.cfg.max_eval_rows :]
        self.held_out += found
        logger.info(
            "%s: %s rows held out of the first %s", source.path, f"{len(found):,}", f"{num_read:,}"
        )

    def _prepare(
        self,
        read: Callable[[Sequence[SourceRow], Sequence[int]], Sequence[E]],
        rows: Sequence[SourceRow],
        numbers: Sequence[int],
        *,
        held_out: bool = False,
    ) -> list[T | Skipped]:
        """Rows for training, or with `held_out` those for evaluation; all others are skipped."""
        examples = read(rows, numbers)
        report = FilterReport()
        opened = open_images(examples, self.images, self.cfg, report)
        found: dict[str, T | Skipped] = {}
        for example, row in zip(opened, self.render(opened), strict=True):
            if self._is_held_out(row) != held_out:
                found[example.id] = Skipped("held_out", example.location)
                continue
            lost = too_long(example, row, self.limits, overlong=self.cfg.overlong_prompts)
            if lost is not None:
                found[example.id] = Skipped("too_long", f"{lost.location} ({lost.length} tokens)")
                continue
            found[example.id] = self.make(example, row)
        problems = iter(report.unreadable)
        return [
            found[example.id] if example.id in found else Skipped("image", next(problems))
            for example in examples
        ]

    def _is_held_out(self, row: R) -> bool:
        return is_held_out(row, seed=self.seed, fraction=self.cfg.held_out_fraction)


def _none_left(source: SourceBase, num_rows: int, report: FilterReport) -> UserError:
    """The error of a source of which filters leave no row."""
    why = "; ".join(report.skipped_in_words)
    return UserError(
        f"{source.path}: none of the {num_rows:,} rows is left: {why}. Change what drops "
        "them, or remove the source; `hone data check` shows each of them"
    )


def is_streamed(cfg: DataConfig, index: SourceIndex) -> bool:
    """Whether a source to train on is read while a run draws from it."""
    sizes = index.sizes
    is_large = sizes.total_bytes > WHOLE_BYTES or sizes.total_rows > WHOLE_ROWS
    return is_large or cfg.shuffle_window is not None


def require_no_order(source: SourceBase) -> None:
    """Raise UserError where a streamed source has a column for the order of all its rows."""
    for role in ROLES:
        if getattr(source.columns, role) is not None:
            raise _needs_all_rows(source, role)


def _needs_all_rows(source: SourceBase, role: Role) -> UserError:
    """The error of a large source of which all rows are to be known before the run."""
    remedy = f"leave columns.{role} unset"
    if role == "difficulty":
        remedy = (
            f"write its files in the order of column {source.columns.difficulty!r}, set "
            f"data.shuffle false and {remedy}"
        )
    return UserError(
        f"{source.path}: columns.{role} is for a source that is read whole before the run, and "
        f"this one is read as the run draws from it, since it has more than {WHOLE_ROWS:,} rows or "
        f"{WHOLE_BYTES >> 20} MiB, or data.shuffle_window is set. Read fewer rows (max_rows), or "
        f"{remedy}"
    )
