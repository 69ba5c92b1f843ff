"""The rows of a run: read, rendered, filtered by length, parted into training and evaluation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from hone.config.data import DataConfig, SourceBase
from hone.config.errors import UserError
from hone.data.filters import FilterReport, LengthLimit, Located, RenderedRow, filter_length
from hone.data.sources import Row, read_source, source_names
from hone.data.stream import Item, Stream, keyed_hash

__all__ = ["Data", "is_held_out", "load_data"]

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=Located)
R = TypeVar("R", bound=RenderedRow)
T = TypeVar("T", bound=Item)


@dataclass(frozen=True, slots=True)
class Data(Generic[T]):
    """The rows of a run."""

    train: Stream[T]
    eval: list[T]
    report: FilterReport

    def all_rows(self) -> list[T]:
        """All of them, those to train on first."""
        return [*(row for source in self.train.sources for row in source), *self.eval]


def is_held_out(row_id: str, *, seed: int, fraction: float) -> bool:
    """Whether a row is for evaluation: a pure function of (seed, id), whatever else is loaded."""
    return keyed_hash("held out", seed, row_id) < fraction * 2**64


def load_data(
    cfg: DataConfig,
    *,
    read: Callable[[Sequence[Row], SourceBase, str], Sequence[E]],
    render: Callable[[Sequence[E]], Sequence[R]],
    limits: Sequence[LengthLimit[R]],
    make: Callable[[E, R], T],
    content: Callable[[T], object],
    seed: int,
) -> Data[T]:
    """Every source is `read`, given its rows and the first half of their ids; `render` its
    examples, drop those beyond the `limits`, `make` rows of the others, and part training from
    evaluation rows. `content` is what of a row identifies the data.

    Raises UserError for anything wrong with the data, also if a source keeps no training row, or
    `eval_fraction` holds none out.
    """
    if not cfg.train and not cfg.eval:
        raise UserError("no data: name at least one source in data.train")
    report = FilterReport()

    def load(source: SourceBase, name: str) -> list[T]:
        examples = read(read_source(source), source, name)
        rendered = render(examples)
        kept = filter_length(
            examples, rendered, limits, overlong=cfg.overlong_prompts, report=report
        )
        return [make(example, row) for example, row in kept]

    sources = [*cfg.train, *cfg.eval]
    loaded = list(map(load, sources, source_names(sources)))
    train = loaded[: len(cfg.train)]
    evaluation = [row for rows in loaded[len(cfg.train) :] for row in rows]
    if not cfg.eval and cfg.eval_fraction:
        train, evaluation = _hold_out(cfg, train, seed)
    level = logging.WARNING if report.dropped else logging.INFO
    logger.log(level, "%s", report.summary(len(evaluation)))
    weights = [source.weight for source in cfg.train]
    stream = Stream(train, seed=seed, weights=weights, shuffle=cfg.shuffle, content=content)
    return Data(stream, evaluation, report)


def _hold_out(
    cfg: DataConfig, sources: Sequence[Sequence[T]], seed: int
) -> tuple[list[list[T]], list[T]]:
    """The rows of each source to train on, and `eval_fraction` of all rows."""

    def held_out(row: T) -> bool:
        return is_held_out(row.id, seed=seed, fraction=cfg.eval_fraction)

    evaluation = [row for rows in sources for row in rows if held_out(row)]
    kept = [[row for row in rows if not held_out(row)] for rows in sources]
    for source, rows, rest in zip(cfg.train, sources, kept, strict=True):
        if not rest:
            raise UserError(
                f"data.eval_fraction = {cfg.eval_fraction} leaves none of the {len(rows)} rows "
                f"of {source.path} for training; lower it or name a data.eval source"
            )
    if not evaluation:
        raise UserError(
            f"data.eval_fraction = {cfg.eval_fraction} holds out none of "
            f"{sum(map(len, sources))} rows; raise it or name a data.eval source"
        )
    return kept, evaluation
