"""Decides which steps of a run are saved, and estimates how long saving takes."""

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
    """Saves on schedule, on request, and after an evaluation that is the best so far.

    Training goes on while a checkpoint is written; only the last save is waited for. A checkpoint
    is ranked by an evaluation of its own step, never by an older one.
    """

    store: CheckpointStore
    cfg: CheckpointConfig
    state: Callable[[], Mapping[str, Any]]
    """Returns the state that a checkpoint stores, by part name."""
    readable: Callable[[int], AbstractContextManager[Any]] = nullcontext
    """Context manager, given a step, in which `state` can be called."""
    published: Callable[[int, float | None], None] = lambda step, metric: None
    """Called with step and metric of each checkpoint once it is on disk."""
    _best: float = field(default=float("-inf"))
    _unpublished: tuple[int, float | None] | None = None

    def __post_init__(self) -> None:
        self._best = self.store.best_metric()

    def after(self, step: int, metric: float | None) -> None:
        """Save `step` if it is due. `metric` is that of its evaluation, larger is better, or None.

        Collective. Raises CheckpointError if this save or the one before it cannot be written.
        """
        self._check(wait=False)
        is_best = self.cfg.keep_best and metric is not None and metric > self._best
        every = self.cfg.every_n_steps
        if not (is_best or (every and step % every == 0)):
            return
        self._check(wait=True)
        with self.readable(step):
            self.store.save_in_background(step, self.state(), metric=metric)
        self._unpublished = step, metric
        if metric is not None:
            self._best = max(self._best, metric)
        self._check(wait=False)

    def last(self, step: int, metric: float | None) -> None:
        """Save `step`, the last of this launch, and wait until it is written. Must be called in a
        phase in which `state` can be read.

        Collective. Raises CheckpointError if it cannot be written.
        """
        self.settle()
        self.store.save(step, self.state(), metric=metric)
        self._unpublished = step, metric
        self._check(wait=True)

    def settle(self) -> None:
        """Wait for the save in progress and ignore its failure. Collective."""
        with suppress(CheckpointError):
            self._check(wait=True)
        self._unpublished = None

    def publish_written(self) -> None:
        """Call `published` for a save that is on disk when an error ends the run. For the first
        process; not collective."""
        if self._unpublished is not None and self.store.has_published():
            self.published(*self._unpublished)
            self._unpublished = None

    def _check(self, *, wait: bool) -> None:
        """Call `published` if the last save is complete by now."""
        if self._unpublished is None:
            return
        if wait:
            self.store.wait()
        elif not self.store.is_written():
            return
        self.published(*self._unpublished)
        self._unpublished = None


def time_in_words(model_bytes: int, state_bytes: int, bytes_per_s: float) -> str:
    """Describe how long a run that is asked to end will write."""
    model_s, state_s = model_bytes / bytes_per_s, state_bytes / bytes_per_s
    return (
        f"the model ({model_bytes / 1e9:.1f} GB) takes about {model_s:.0f} s to write, then the "
        f"state ({state_bytes / 1e9:.1f} GB) {state_s:.0f} s, if it fits"
    )
