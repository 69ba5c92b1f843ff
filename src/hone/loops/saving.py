"""Which steps of a run are saved, and how long that takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from hone.checkpoint.atomic import CheckpointError
from hone.checkpoint.store import CheckpointStore
from hone.config.run import CheckpointConfig

__all__ = ["Saver", "time_in_words"]


@dataclass(slots=True)
class Saver:
    """Saves on schedule, where it is asked to, and whenever an evaluation is the best so far.

    Writing goes on behind the training; the last save is waited for.

    A checkpoint is ranked only by an evaluation of its own step, never by an older one.
    """

    store: CheckpointStore
    cfg: CheckpointConfig
    state: Callable[[], Mapping[str, Any]]
    """Everything a checkpoint must hold, by part."""
    readable: Callable[[int], AbstractContextManager[Any]] = nullcontext
    """Given a step; inside, `state` can be called."""
    published: Callable[[int, float | None], None] = lambda step, rank: None
    """Called with the step of each checkpoint, and with its rank, once it is on disk."""
    _best: float = field(default=float("-inf"))
    _unpublished: tuple[int, float | None] | None = None

    def __post_init__(self) -> None:
        self._best = self.store.best_metric()

    def after(self, step: int, rank: float | None) -> None:
        """Save `step` if it is due; `rank` is its evaluation, larger is better, None without one.

        Raises CheckpointError where it, or the one before it, cannot be written. Collective.
        """
        self._check(wait=False)
        is_best = self.cfg.keep_best and rank is not None and rank > self._best
        every = self.cfg.every_n_steps
        if not (is_best or (every and step % every == 0)):
            return
        self._check(wait=True)
        with self.readable(step):
            self.store.save_in_background(step, self.state(), metric=rank)
        self._unpublished = step, rank
        if rank is not None:
            self._best = max(self._best, rank)
        self._check(wait=False)

    def last(self, step: int, rank: float | None) -> None:
        """Save `step`, the last of this launch, and wait until it is written. Called where `state`
        can be.

        Raises CheckpointError where it cannot be written. Collective.
        """
        self.settle()
        self.store.save(step, self.state(), metric=rank)
        self._unpublished = step, rank
        self._check(wait=True)

    def settle(self) -> None:
        """Wait for a save that is under way; what has become of one that failed is no matter any
        more. Collective."""
        with suppress(CheckpointError):
            self._check(wait=True)
        self._unpublished = None

    def publish_written(self) -> None:
        """Call `published` for a save that is on disk when an error ends the run. Not collective:
        of the first process."""
        if self._unpublished is not None and self.store.has_published():
            self.published(*self._unpublished)
            self._unpublished = None

    def _check(self, *, wait: bool) -> None:
        """Call `published` where the last save has become a checkpoint by now."""
        if self._unpublished is None:
            return
        if wait:
            self.store.wait()
        elif not self.store.is_written():
            return
        self.published(*self._unpublished)
        self._unpublished = None


def time_in_words(model_bytes: int, state_bytes: int, bytes_per_s: float) -> str:
    """How long a run that is asked to end writes, for whoever waits for that."""
    model_s, state_s = model_bytes / bytes_per_s, state_bytes / bytes_per_s
    return (
        f"the model ({model_bytes / 1e9:.1f} GB) takes about {model_s:.0f} s to write, then the "
        f"state ({state_bytes / 1e9:.1f} GB) {state_s:.0f} s, if it fits"
    )
