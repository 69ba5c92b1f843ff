"""What one process does for others: it drives the engines and references of the pool, or the one
engine that is over them all.

All training processes make the same calls. The first one draws prompts, drives the engines and
scores; meanwhile the others wait for its messages: the result in the end, before it now and then
that they should keep waiting, and, where no engine is left that holds weights, that all processes
must push theirs again. Of an engine over several training processes the first does the same for
those; their messages are the engine's calls. Processes that train a critic hear from the first one
of all what it has collected.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from time import monotonic
from typing import Any, NamedTuple, Protocol, TypeVar

from hone.algorithms.algorithm import Outputs
from hone.config.algorithm import Output
from hone.config.run import EvaluationConfig
from hone.distributed.channel import Channel
from hone.distributed.mesh import Mesh
from hone.engine.lockstep import LockStepEngine
from hone.rollout.buffer import Progress
from hone.rollout.collector import Collector
from hone.rollout.counts import RolloutCounts
from hone.rollout.engine_pool import EnginePool
from hone.rollout.scorer_pool import ScorerPool
from hone.types import EngineLostError, Group, Prompt, Row, Sample
from hone.weights.broadcast import BroadcastSync
from hone.weights.sync import SyncReport

__all__ = ["Controller", "CriticLead", "EngineLead", "Rank0Collector", "Rank0Scorer"]

T = TypeVar("T")
PlanPasses = Callable[[Sequence[Row]], list[list[int]]]
"""Rows to the indices of each pass."""
_log = logging.getLogger(__name__)

MAX_PUSHES = 10
"""Most times that one version is pushed. An engine that takes part and is lost costs one of
the pool's restarts; this bounds failures that cost none."""
KEEPALIVE_S = 5.0
"""How often waiting processes get a message. Well below any timeout of theirs."""


class _Message(Enum):
    WAIT = auto()
    PUSH_WEIGHTS = auto()
    RESULT = auto()


class Lead(Protocol):
    """How one process works for others."""

    def broadcast_from_rank0(self, make: Callable[[Progress], T]) -> T:
        """What `make` returns in the first process, in all. Collective.

        `make` gets a function that it calls between steps of the engines, with how many samples
        are finished and wanted.
        """
        ...

    def trainer_holds(self, version: int) -> None:
        """The trainer holds `version` from now on."""
        ...


@dataclass(frozen=True, slots=True)
class EngineLead:
    """Runs work in the first rank of an engine, for its ranks."""

    engine: LockStepEngine
    is_first: bool

    def broadcast_from_rank0(self, make: Callable[[Progress], T]) -> T:
        """As `Lead.broadcast_from_rank0`."""
        if not self.is_first:
            return self.engine.follow()
        return self.engine.lead(lambda: make(lambda _finished, _wanted: self.engine.keep_waiting()))

    def trainer_holds(self, version: int) -> None:
        """Nothing follows: the ranks receive weights together with the other trainers."""
        del version


@dataclass(slots=True)
class Controller:
    """Runs work in the first process of `mesh`, which has the `engines`, for all. In the others
    `engines` is None."""

    mesh: Mesh
    engines: EnginePool | None
    weights: BroadcastSync
    _version: int = 0
    _last_message_s: float = field(default_factory=monotonic)

    def push(self, version: int) -> SyncReport:
        """Bring the trainer's weights to all engines, as `WeightSync.push`. Collective.

        Where an engine is lost meanwhile, the push is repeated for the others and its replacement,
        as long as engines may be restarted.
        """
        self._version = version
        for _ in range(MAX_PUSHES - 1):
            try:
                return self.weights.push(version)
            except EngineLostError as error:
                if self.mesh.is_first:
                    _log.warning("weights are pushed once more: %s", error)
        return self.weights.push(version)

    def broadcast_from_rank0(self, make: Callable[[Progress], T]) -> T:
        """As `Lead.broadcast_from_rank0`."""
        if self.engines is None:
            return _receive(self.mesh, self.push)
        value = make(self._between_steps)
        self._send(_Message.RESULT, value)
        return value

    def trainer_holds(self, version: int) -> None:
        """The trainer holds `version` from now on: a push before its own is of this version."""
        self._version = version

    def _between_steps(self, finished: int, wanted: int) -> None:
        assert self.engines is not None
        if self.engines.needs_weights:
            self._send(_Message.PUSH_WEIGHTS, self._version)
            self.push(self._version)
        elif monotonic() - self._last_message_s > KEEPALIVE_S:
            self._send(_Message.WAIT)

    def _send(self, message: _Message, value: Any = None) -> None:
        self.mesh.broadcast((message, value))
        self._last_message_s = monotonic()


@dataclass(slots=True)
class CriticLead:
    """Runs work in the first process as `lead` does, for the critic's processes too, which have
    none."""

    channel: Channel
    """The first process, and those of the critic."""
    lead: Lead | None = None
    _last_message_s: float = field(default_factory=monotonic)

    def broadcast_from_rank0(self, make: Callable[[Progress], T]) -> T:
        """As `Lead.broadcast_from_rank0`."""
        if self.lead is None:
            return _receive(self.channel)

        def make_told(between: Progress) -> T:
            def both(finished: int, wanted: int) -> None:
                between(finished, wanted)
                if monotonic() - self._last_message_s > KEEPALIVE_S:
                    self._send(_Message.WAIT)

            return make(both)

        value = self.lead.broadcast_from_rank0(make_told)
        self._send(_Message.RESULT, value)
        return value

    def trainer_holds(self, version: int) -> None:
        """As `Lead.trainer_holds`; the critic's weights go to no engine."""
        if self.lead is not None:
            self.lead.trainer_holds(version)

    def _send(self, message: _Message, value: Any = None) -> None:
        self.channel.broadcast((message, value))
        self._last_message_s = monotonic()


def _receive(mesh: Mesh | Channel, push: Callable[[int], object] | None = None) -> Any:
    """The result of the first process, once it has sent it."""
    while True:
        message, value = mesh.broadcast(None)
        if message is _Message.RESULT:
            return value
        if message is _Message.PUSH_WEIGHTS and push is not None:
            push(value)


class Rank0Collector:
    """A `Collector` in the first process, its groups in all."""

    def __init__(self, lead: Lead, collector: Collector | None) -> None:
        self._lead = lead
        self._collector = collector
        self.counts = RolloutCounts()

    def collect(self, step: int, progress: Progress | None = None) -> list[Group]:
        """The scored groups of `step`. Collective."""

        def make(between: Progress) -> tuple[list[Group], RolloutCounts]:
            def both(finished: int, wanted: int) -> None:
                between(finished, wanted)
                if progress is not None:
                    progress(finished, wanted)

            assert self._collector is not None
            return self._collector.collect(step, both), self._collector.counts

        groups, self.counts = self._lead.broadcast_from_rank0(make)
        return groups

    def evaluate(
        self,
        prompts: Sequence[Prompt],
        cfg: EvaluationConfig,
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> list[Sample] | None:
        """As `Collector.evaluate`; `should_stop` of the first process counts. Collective."""

        def make(between: Progress) -> list[Sample] | None:
            assert self._collector is not None
            return self._collector.evaluate(prompts, cfg, progress=between, should_stop=should_stop)

        return self._lead.broadcast_from_rank0(make)

    def background(self) -> AbstractContextManager[None]:
        """As `Collector.background`."""
        return nullcontext() if self._collector is None else self._collector.background()

    @contextmanager
    def pause(self, version: int) -> Generator[None]:
        """As `Collector.pause`, for which the other processes wait. Collective."""
        self._lead.trainer_holds(version)
        with ExitStack() as stack:

            def enter(between: Progress) -> None:
                assert self._collector is not None
                stack.enter_context(self._collector.pause(version, between))

            self._lead.broadcast_from_rank0(enter)
            yield

    def idle(self) -> AbstractContextManager[None]:
        """As `Collector.idle`."""
        return nullcontext() if self._collector is None else self._collector.idle()

    def state_dict(self) -> dict[str, Any]:
        """That of the first process, which writes it; while idle."""
        return {} if self._collector is None else self._collector.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        if self._collector is not None:
            self._collector.load_state_dict(state)


class _Ahead(NamedTuple):
    row: Row
    scoring: Future[list[Outputs]]
    number: int
    """Of the row, in what it will have found."""


class Rank0Scorer:
    """A `ScorerPool` in the first process, what it finds in all. Implements `RowScorer`."""

    def __init__(self, mesh: Mesh, pool: ScorerPool | None, plan: PlanPasses) -> None:
        """`plan` says in which passes rows are scored."""
        self._mesh = mesh
        self._pool = pool
        self._plan = plan
        self._ahead: dict[str, _Ahead] = {}
        """Rows whose scoring was begun before they were asked for, by id."""

    def begin_ahead(self, rows: Sequence[Row], outputs: frozenset[Output]) -> None:
        """Begin to score rows of which `begin` will ask the same `outputs`, in the first process
        alone and any thread of it. Raises ValueError as `PlanPasses`."""
        assert self._pool is not None
        scoring = self._pool.begin(rows, self._plan(rows), outputs)
        self._ahead |= {row.id: _Ahead(row, scoring, i) for i, row in enumerate(rows)}

    def begin(self, rows: Sequence[Row], outputs: frozenset[Output]) -> Callable[[], list[Outputs]]:
        """Begun at once, in the background, but for what `begin_ahead` has begun."""
        passes = self._plan(rows)  # in all processes, since it refuses rows that are too long
        if self._pool is None:
            return partial(_receive, self._mesh)
        ahead = [self._take(row) for row in rows]
        rest = [row for row, begun in zip(rows, ahead, strict=True) if begun is None]
        if len(rest) < len(rows):
            passes = self._plan(rest) if rest else []
        return partial(self._send, self._pool.begin(rest, passes, outputs), ahead)

    def _take(self, row: Row) -> _Ahead | None:
        """What was begun of a row, if it is still the same."""
        begun = self._ahead.pop(row.id, None)
        is_same = begun is not None and (
            [*begun.row.token_ids] == [*row.token_ids]
            and [*begun.row.loss_mask] == [*row.loss_mask]
        )
        return begun if is_same else None

    def _send(
        self, scoring: Future[list[Outputs]], ahead: Sequence[_Ahead | None]
    ) -> list[Outputs]:
        all_of_it = [scoring, *(begun.scoring for begun in ahead if begun is not None)]
        while wait(all_of_it, KEEPALIVE_S).not_done:
            self._mesh.broadcast((_Message.WAIT, None))
        rest = iter(scoring.result())
        found = [begun.scoring.result()[begun.number] if begun else next(rest) for begun in ahead]
        self._mesh.broadcast((_Message.RESULT, found))
        return found
