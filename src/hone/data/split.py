"""The rows of a run: read, rendered, filtered by length, parted into training and evaluation."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic, TypeVar

from hone.config.data import DataConfig, SourceBase
from hone.data.filters import FilterReport, LengthLimit, Located, RenderedRow, filter_length
from hone.data.sources import Row, read_source, source_names
from hone.data.stream import Item, Stream, keyed_hash
from hone.errors import UserError

__all__ = ["Data", "HeldOut", "is_held_out", "load_data"]

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


class HeldOut:
    """Which rows are for evaluation: all rows of a prompt or none, in whatever source they are.

    The first row of a prompt decides for all of them. So a prompt that is there once goes where
    `is_held_out` puts it, and only rows that repeat one depend on other rows.
    """

    def __init__(self, *, seed: int, fraction: float) -> None:
        """`fraction` is the share of the prompts, from 0 to 1."""
        self._seed, self._fraction = seed, fraction
        self._known: dict[bytes, bool] = {}
        """By the digest of a prompt's ids: some hundred bytes for each prompt."""

    def __call__(self, row_id: str, prompt_ids: Sequence[int]) -> bool:
        """Whether a row is; rows are given in the order of the data."""
        if self._fraction == 0:
            return False
        digest = blake2b(array("q", prompt_ids), digest_size=16).digest()
        if digest not in self._known:
            self._known[digest] = is_held_out(row_id, seed=self._seed, fraction=self._fraction)
        return self._known[digest]

    @property
    def num_prompts(self) -> int:
        """Different prompts among the rows given so far."""
        return len(self._known)


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
    held_out = HeldOut(seed=seed, fraction=0.0 if cfg.eval else cfg.eval_fraction)
    evaluated: set[str] = set()

    def load(source: SourceBase, name: str) -> list[T]:
        examples = read(read_source(source), source, name)
        rendered = render(examples)
        # Of all rows that were read: which ones are too long must not change where a prompt goes.
        for example, row in zip(examples, rendered, strict=True):
            if held_out(example.id, row.prompt_ids):
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
    level = logging.WARNING if report.dropped else logging.INFO
    logger.log(level, "%s", report.summary(len(evaluation)))
    weights = [source.weight for source in cfg.train]
    stream = Stream(train, seed=seed, weights=weights, shuffle=cfg.shuffle, content=content)
    return Data(stream, evaluation, report)


def _hold_out(
    cfg: DataConfig, sources: Sequence[Sequence[T]], held_out: Collection[str], num_prompts: int
) -> tuple[list[list[T]], list[T]]:
    """The rows of each source to train on, and those whose ids are held out."""
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
