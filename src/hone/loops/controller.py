"""What the first training process does alone and tells the others: sampling, with engines apart.

All processes make the same calls. The first one, the controller, draws prompts, drives the engines
and scores; meanwhile the others wait for what it has to tell. That is a value in the end, before it
now and then that they should go on waiting, and, where no engine is left that holds weights, that
all of them must send theirs again. References that are elsewhere are driven by the first one too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from torch import Tensor

from hone.distributed.mesh import Mesh
from hone.rollout.counts import RolloutCounts, StreamCounts
from hone.rollout.engine_group import EngineGroup
from hone.rollout.open_groups import Progress
from hone.rollout.reference_group import ReferenceGroup
from hone.rollout.rollout import Rollout
from hone.rollout.stream import RolloutStream
from hone.types import EngineLostError, Group, Trajectory
from hone.weights.broadcast import BroadcastSync
from hone.weights.sync import SyncReport

__all__ = ["Controller", "LedReference", "LedRollout", "LedStream"]

T = TypeVar("T")
PlanPasses = Callable[[Sequence[Trajectory]], list[list[int]]]
"""Rows to the indices of each pass."""
_log = logging.getLogger(__name__)

_PUSHES = 10
"""Most times that one version is sent. An engine that takes part and is lost costs one of
`cluster.max_engine_restarts`; this bounds what costs none."""
_WORD_S = 5.0
"""How often those who wait hear that they should. Well below any deadline of theirs."""


class _News(Enum):
    WAIT = auto()
    WEIGHTS = auto()
    VALUE = auto()


@dataclass(slots=True)
class Controller:
    """The one of `mesh` that holds `engines`; in the others they are None."""

    mesh: Mesh
    engines: EngineGroup | None
    weights: BroadcastSync
    _version: int = 0
    _told_at: float = field(default_factory=monotonic)

    def push(self, version: int) -> SyncReport:
        """Bring the trainer's weights to all engines, as `WeightSync.push`. Collective.

        Where an engine is lost meanwhile, the others and whoever replaces it get them anew, as long
        as engines may be restarted.
        """
        self._version = version
        for _ in range(_PUSHES - 1):
            try:
                return self.weights.push(version)
            except EngineLostError as error:
                if self.mesh.is_first:
                    _log.warning("weights are sent once more: %s", error)
        return self.weights.push(version)

    def has_updated(self, version: int) -> None:
        """The trainer holds `version` from now on; what is sent again before it is pushed is it."""
        self._version = version

    def share(self, make: Callable[[Progress], T]) -> T:
        """What `make` returns in the first process, in all. Collective.

        `make` gets a function that it calls between steps of the engines, with how many samples
        are done and wanted.
        """
        if self.engines is not None:
            value = make(self._between_steps)
            self._tell(_News.VALUE, value)
            return value
        while True:
            news, value = self.mesh.broadcast(None)
            if news is _News.WEIGHTS:
                self.push(self._version)
            elif news is _News.VALUE:
                return value

    def _between_steps(self, finished: int, wanted: int) -> None:
        assert self.engines is not None
        if self.engines.needs_weights:
            self._tell(_News.WEIGHTS)
            self.push(self._version)
        elif monotonic() - self._told_at > _WORD_S:
            self._tell(_News.WAIT)

    def _tell(self, news: _News, value: Any = None) -> None:
        self.mesh.broadcast((news, value))
        self._told_at = monotonic()


def _both(first: Progress, second: Progress | None) -> Progress:
    def progress(finished: int, wanted: int) -> None:
        first(finished, wanted)
        if second is not None:
            second(finished, wanted)

    return progress


class LedRollout:
    """`Rollout` in the first process, its groups in all."""

    def __init__(self, controller: Controller, rollout: Rollout | None) -> None:
        self._controller = controller
        self._rollout = rollout
        self.counts = RolloutCounts()

    def collect(self, step: int, progress: Progress | None = None) -> list[Group]:
        """The scored groups of `step`. Collective."""

        def make(between: Progress) -> tuple[list[Group], RolloutCounts]:
            assert self._rollout is not None
            groups = self._rollout.collect(step, _both(between, progress))
            return groups, self._rollout.counts

        groups, self.counts = self._controller.share(make)
        return groups

    def state_dict(self) -> dict[str, Any]:
        """That of the first process, which writes it."""
        return {} if self._rollout is None else self._rollout.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        if self._rollout is not None:
            self._rollout.load_state_dict(state)


class LedStream:
    """`RolloutStream` in the first process, its groups in all."""

    def __init__(self, controller: Controller, stream: RolloutStream | None) -> None:
        self._controller = controller
        self._stream = stream
        self._is_suspended = False
        self.counts = StreamCounts()

    def collect(self, step: int, progress: Progress | None = None) -> list[Group]:
        """The scored groups of `step`, the update of version `step` - 1. Collective."""

        def make(between: Progress) -> tuple[list[Group], StreamCounts]:
            assert self._stream is not None
            groups = self._stream.take(step - 1, _both(between, progress))
            return groups, self._stream.counts

        groups, self.counts = self._controller.share(make)
        return groups

    def in_background(self) -> AbstractContextManager[None]:
        """Inside, sampling and scoring go on beside whatever the caller does."""
        return nullcontext() if self._stream is None else self._stream.in_background()

    @contextmanager
    def changing_weights(self, version: int) -> Generator[None]:
        """Inside, unfinished samples are as `pipeline.in_flight` says; `version` comes. Collective
        in that the others wait for the first process."""
        self._controller.has_updated(version)
        self._controller.share(self._before_sync)
        yield
        if self._stream is not None:
            self._stream.after_sync(version)

    def _before_sync(self, between: Progress) -> None:
        assert self._stream is not None
        self._stream.before_sync(between)

    @contextmanager
    def suspended(self) -> Generator[None]:
        """Inside, nothing is in flight: engines are free, and the state holds every token."""
        if self._stream is None or self._is_suspended:
            yield
            return
        self._stream.suspend()
        self._is_suspended = True
        yield
        self._is_suspended = False
        self._stream.resume()

    def state_dict(self) -> dict[str, Any]:
        """That of the first process, which writes it; while suspended."""
        return {} if self._stream is None else self._stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        if self._stream is not None:
            self._stream.load_state_dict(state)


class LedReference:
    """`ReferenceGroup` in the first process, its log-probabilities in all."""

    def __init__(self, mesh: Mesh, references: ReferenceGroup | None, plan: PlanPasses) -> None:
        """`plan` says in which passes rows are scored."""
        self._mesh = mesh
        self._references = references
        self._plan = plan

    def begin(self, rows: Sequence[Trajectory]) -> Callable[[], list[Tensor]]:
        """Begin to score the trained tokens of `rows`; what is returned waits for the outcome:
        [N_i] float32 on the CPU for each row. Collective, as is the waiting."""
        passes = self._plan(rows)  # in all processes, since it refuses rows that are too long
        if self._references is None:
            return self._told
        return partial(self._tell, self._references.begin(rows, passes))

    def _tell(self, scoring: Future[list[Tensor]]) -> list[Tensor]:
        while not wait([scoring], _WORD_S).done:
            self._mesh.broadcast((_News.WAIT, None))
        self._mesh.broadcast((_News.VALUE, scoring.result()))
        return scoring.result()

    def _told(self) -> list[Tensor]:
        while True:
            news, value = self._mesh.broadcast(None)
            if news is _News.VALUE:
                return value
