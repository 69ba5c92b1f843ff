"""Which rows of a run are for training and which for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from hone.data.filters import FilterReport, RenderedRow
from hone.data.hashing import keyed_hash
from hone.data.row_source import Item
from hone.data.stream import Stream
from hone.model_input import prompt_digest
from hone.observe.metrics import Last, Metrics

__all__ = ["Data", "is_held_out"]

T = TypeVar("T", bound=Item)


@dataclass(frozen=True, slots=True)
class Data(Generic[T]):
    """The rows of a run."""

    train: Stream[T]
    eval: list[T]
    report: FilterReport
    """Of the sources that are read whole."""

    def known_rows(self) -> list[T]:
        """The rows that are known before the run, training rows first: all rows of sources that are
        read whole, and the first ones of the others."""
        return [*self.train.first_rows(), *self.eval]

    def metrics(self) -> Metrics:
        """How many rows were read and skipped so far, where some are read during the run; and how
        many each of several sources has given since this was last asked."""
        drawn = {f"drawn/{name}": number for name, number in self.train.drawn().items()}
        counts = self.train.counts | drawn
        return {f"data/{name}": Last(number) for name, number in counts.items()}

    def check(self, check: Callable[[Sequence[T]], None]) -> None:
        """Call `check` with the rows that are known, and with those that are read later before they
        are drawn. It raises UserError for a row that the run cannot use."""
        check(self.known_rows())
        self.train.add_check(check)


def is_held_out(prompt: RenderedRow, *, seed: int, fraction: float) -> bool:
    """Whether a row is for evaluation: all rows of a prompt are or none, over all sources, whatever
    other rows there are. `fraction` is the share of the prompts, from 0 to 1."""
    if fraction == 0:
        return False
    digest = prompt_digest(prompt.prompt_ids, prompt.model_input).hex()
    return keyed_hash("held out", seed, digest) < fraction * 2**64
