"""Training and evaluation sources, and the rows held out where no evaluation source is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from hone.config.data import DataConfig, SourceConfig
from hone.config.errors import UserError
from hone.data.sources import source_names
from hone.data.stream import Item, keyed_hash

__all__ = ["Split", "is_held_out", "load_split"]

T = TypeVar("T", bound=Item)


@dataclass(frozen=True, slots=True)
class Split(Generic[T]):
    """Rows to train on, a list a source, and rows to evaluate on."""

    train: list[list[T]]
    eval: list[T]


def is_held_out(row_id: str, *, seed: int, fraction: float) -> bool:
    """Whether a row is for evaluation: a pure function of (seed, id), whatever else is loaded."""
    return keyed_hash("held out", seed, row_id) < fraction * 2**64


def load_split(
    cfg: DataConfig, load: Callable[[SourceConfig, str], list[T]], seed: int
) -> Split[T]:
    """Load every source by `load(source, name)` and part training from evaluation rows.

    Raises UserError if a source keeps no training row, or `eval_fraction` holds none out.
    """
    if not cfg.train and not cfg.eval:
        raise UserError("no data: name at least one source in data.train")
    sources = [*cfg.train, *cfg.eval]
    loaded = [
        load(source, name) for source, name in zip(sources, source_names(sources), strict=True)
    ]
    train = loaded[: len(cfg.train)]
    evaluation = [item for items in loaded[len(cfg.train) :] for item in items]
    if cfg.eval or not cfg.eval_fraction:
        return Split(train, evaluation)

    def held_out(item: T) -> bool:
        return is_held_out(item.id, seed=seed, fraction=cfg.eval_fraction)

    evaluation = [item for items in train for item in items if held_out(item)]
    kept = [[item for item in items if not held_out(item)] for items in train]
    for source, items, rest in zip(cfg.train, train, kept, strict=True):
        if not rest:
            raise UserError(
                f"data.eval_fraction = {cfg.eval_fraction} leaves none of the {len(items)} rows "
                f"of {source.path} for training; lower it or name a data.eval source"
            )
    if not evaluation:
        num_rows = sum(map(len, train))
        raise UserError(
            f"data.eval_fraction = {cfg.eval_fraction} holds out none of {num_rows} rows; raise "
            "it or name a data.eval source"
        )
    return Split(kept, evaluation)
