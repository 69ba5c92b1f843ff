"""Running the passes of a role, with or without a retry after an out-of-memory error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from hone.observe.metrics import Metrics
from hone.trainer.batcher import Batcher, PassKind
from hone.trainer.settings import SFTTrainerConfig
from hone.types import Row

__all__ = ["Attempts"]

T = TypeVar("T")


class Attempts:
    """Runs each pass once; an out-of-memory error is raised unchanged.

    `hone.trainer.out_of_memory.Repair` retries with smaller passes.
    """

    num_failures = 0
    """Number of out-of-memory errors since `take_metrics` was last called."""
    cfg: SFTTrainerConfig
    """The configured setting, with the reductions noted in the run folder applied."""

    def __init__(self, cfg: SFTTrainerConfig, *, role: str) -> None:
        self.cfg = cfg
        self._role = role

    def adopt(self, batcher: Batcher, recompute: Callable[[], bool] = lambda: False) -> None:
        """Take the two things that a retry can change: the token caps of `batcher`, and
        `recompute`, which switches recomputation of all layers on and returns False where that
        changes nothing."""

    def take_metrics(self) -> Metrics:
        """The reduced caps, and the number of out-of-memory errors since the last call."""
        return {}

    def until_it_fits(
        self,
        kind: PassKind,
        rows: Sequence[Row],
        compute: Callable[[], T],
        *,
        discard: Callable[[], None] = lambda: None,
    ) -> T:
        """Result of `compute`, which runs passes of this `kind` over `rows` as the batcher cuts
        them. After each failure its memory is freed and `discard` is called."""
        return compute()

    def exhausted(self, what: str, message: str) -> torch.OutOfMemoryError:
        """The error that ends a run in which `what` does not fit. It says which settings would
        help; `message` is torch's own text."""
        return torch.OutOfMemoryError(
            f"{what} of the {self._role} does not fit, and no setting that can change during a "
            f"run is left to reduce. {self._advice()}\nFrom torch: {message}"
        )

    def _advice(self) -> str:
        """A sentence on the settings that would help a new launch; empty where none is known."""
        return ""
