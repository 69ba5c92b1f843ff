"""The rows of a run: read, rendered, filtered by length, split into training and evaluation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from hone.data.filters import FilterReport, LengthLimit, Located, RenderedRow, filter_length
from hone.data.images import WithImages, open_images
from hone.data.settings import DataConfig, SourceBase
from hone.data.sources import SourceRow, read_source, source_names
from hone.data.stream import Item, Stream, keyed_hash
from hone.errors import UserError
from hone.model_input import prompt_digest

if TYPE_CHECKING:
    from hone.images.reader import ImageReader

__all__ = ["Data", "HeldOut", "is_held_out", "load_data"]

logger = logging.getLogger(__name__)


class GivenRow(Located, WithImages, Protocol):
    """A row before it is rendered, which may have images."""


E = TypeVar("E", bound=GivenRow)
R = TypeVar("R", bound=RenderedRow)
T = TypeVar("T", bound=Item)


@dataclass(frozen=True, slots=True)
class Data(Generic[T]):
    """The rows of a run."""

    train: Stream[T]
    eval: list[T]
    report: FilterReport

    def all_rows(self) -> list[T]:
        """All rows, training rows first."""
        return [*(row for source in self.train.sources for row in source), *self.eval]


def is_held_out(row_id: str, *, seed: int, fraction: float) -> bool:
    """Whether a row is for evaluation. It depends only on seed and id, not on other rows."""
    return keyed_hash("held out", seed, row_id) < fraction * 2**64


class HeldOut:
    """Decides which rows are for evaluation: all rows of a prompt or none, over all sources.

    `is_held_out` decides for the first row of a prompt, and its other rows follow. So only rows
    that repeat a prompt depend on other rows.
    """

    def __init__(self, *, seed: int, fraction: float) -> None:
        """`fraction` is the share of the prompts, from 0 to 1."""
        self._seed, self._fraction = seed, fraction
        self._known: dict[bytes, bool] = {}
        """Decisions by digest of the prompt, some hundred bytes each."""

    def __call__(self, row_id: str, prompt: RenderedRow) -> bool:
        """Whether a row is for evaluation. Rows must come in the order of the data."""
        if self._fraction == 0:
            return False
        digest = prompt_digest(prompt.prompt_ids, prompt.model_input)
        if digest not in self._known:
            self._known[digest] = is_held_out(row_id, seed=self._seed, fraction=self._fraction)
        return self._known[digest]

    @property
    def num_prompts(self) -> int:
        """Number of different prompts so far."""
        return len(self._known)


def load_data(
    cfg: DataConfig,
    *,
    read: Callable[[Sequence[SourceRow], SourceBase, str], Sequence[E]],
    render: Callable[[Sequence[E]], Sequence[R]],
    limits: Sequence[LengthLimit[R]],
    make: Callable[[E, R], T],
    content: Callable[[T], object],
    seed: int,
    images: ImageReader | None = None,
) -> Data[T]:
    """Load all sources, and split their rows into training and evaluation.

    For each source `read(rows, source, name)` makes examples whose ids begin with the name,
    `images` opens their images (None: the model reads text alone), `render` renders them, rows
    beyond the `limits` are dropped, and `make` builds the items.
    `content` is the part of an item by which `Stream` recognises the data.

    Raises UserError for anything wrong with the data, and where a source has no training row left
    or `eval_fraction` holds out no row.
    """
    if not cfg.train and not cfg.eval:
        raise UserError("no data: name at least one source in data.train")
    report = FilterReport()
    held_out = HeldOut(seed=seed, fraction=0.0 if cfg.eval else cfg.eval_fraction)
    evaluated: set[str] = set()

    def load(source: SourceBase, name: str) -> list[T]:
        examples = open_images(read(read_source(source), source, name), images, cfg, report)
        rendered = render(examples)
        # Before the length filter: a changed limit must not move a prompt to the other split.
        for example, row in zip(examples, rendered, strict=True):
            if held_out(example.id, row):
                evaluated.add(example.id)
        kept = filter_length(
            examples, rendered, limits, overlong=cfg.overlong_prompts, report=report
        )
        return [make(example, row) for example, row in kept]

    sources = [*cfg.train, *cfg.eval]
    loaded = list(map(load, sources, source_names(sources)))
    train = loaded[: len(cfg.train)]
    evaluation = [row for rows in loaded[len(cfg.train) :] for row in rows]
    if not cfg.eval and cfg.eval_fraction:
        train, evaluation = _hold_out(cfg, train, evaluated, held_out.num_prompts)
    level = logging.WARNING if report.dropped or report.unreadable else logging.INFO
    logger.log(level, "%s", report.summary(len(evaluation)))
    weights = [source.weight for source in cfg.train]
    stream = Stream(train, seed=seed, weights=weights, shuffle=cfg.shuffle, content=content)
    return Data(stream, evaluation, report)


def _hold_out(
    cfg: DataConfig, sources: Sequence[Sequence[T]], held_out: Collection[str], num_prompts: int
) -> tuple[list[list[T]], list[T]]:
    """The training rows of each source, and all rows whose ids are held out."""
    evaluation = [row for rows in sources for row in rows if row.id in held_out]
    kept = [[row for row in rows if row.id not in held_out] for rows in sources]
    num_rows, together = sum(map(len, sources)), ""
    if num_prompts < num_rows:
        together = f". Rows of a prompt stay together, and there are {num_prompts} prompts in all"
    for source, rows, rest in zip(cfg.train, sources, kept, strict=True):
        if not rest:
            raise UserError(
                f"data.eval_fraction = {cfg.eval_fraction} leaves none of the {len(rows)} rows "
                f"of {source.path} for training; lower it or name a data.eval source{together}"
            )
    if not evaluation:
        raise UserError(
            f"data.eval_fraction = {cfg.eval_fraction} holds out none of "
            f"{num_rows} rows; raise it or name a data.eval source{together}"
        )
    return kept, evaluation
