"""Work that the first process does for all: driving engines and remote scorers.

All training processes run the same loop. Where the first one draws prompts, drives engines and
scores, the others follow its team (`hone.distributed.team`) until they get the result. In an engine
over several processes the ranks follow the engine's first rank in the same way. If no engine with
weights is left, all processes push the weights again. Processes that train a critic follow the
first process of the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

from hone.algorithms.algorithm import Outputs
from hone.algorithms.settings import Output
from hone.config.run import EvaluationConfig
from hone.distributed.mesh import Mesh
from hone.distributed.team import Team, run_for
from hone.rollout.buffer import Progress
from hone.rollout.collector import Collector
from hone.rollout.counts import RolloutCounts
from hone.rollout.engine_pool import EnginePool
from hone.rollout.scorer_pool import ScorerPool
from hone.types import EngineLostError, Group, Prompt, Row, Sample
from hone.weights.broadcast import BroadcastSync
from hone.weights.sync import SyncReport

__all__ = ["PoolWeights", "Rank0Collector", "Rank0Scorer"]

T = TypeVar("T")
PlanPasses = Callable[[Sequence[Row]], list[list[int]]]
"""Maps rows to lists of row indices, one list per forward pass."""
_log = logging.getLogger(__name__)

MAX_PUSHES = 10
"""Attempts to push one weight version. A lost engine costs one of the pool's restarts; this limit
bounds failures that cost none."""
LOOK_S = 1.0
"""Longest wait for scores before the other processes get a sign of life."""


class PoolWeights:
    """Sends the trainers' weights to the engines of a pool. `engines` is None in processes other
    than the first one."""

    def __init__(self, sync: BroadcastSync, engines: EnginePool | None, mesh: Mesh) -> None:
        self._sync = sync
        self._engines = engines
        self._version = 0
        self.team = Team(mesh, is_first=mesh.is_first, calls={"push": self.push})

    def push(self, version: int) -> SyncReport:
        """Send the trainer's weights to all engines. See `WeightSync.push`. Collective.

        If an engine is lost during a push, the push is repeated for the others and its replacement,
        as long as engines may be restarted.
        """
        self._version = version
        for _ in range(MAX_PUSHES - 1):
            try:
                return self._sync.push(version)
            except EngineLostError as error:
                if self._engines is not None:
                    _log.warning("weights are pushed once more: %s", error)
        return self._sync.push(version)

    def trainer_holds(self, version: int) -> None:
        """Set the version that the trainer holds: `push_if_lost` may be called before the push of
        it."""
        self._version = version

    def push_if_lost(self) -> None:
        """Let all processes push their weights again if no engine with weights is left. Called in
        the first process, while the others follow its team."""
        if self._engines is not None and self._engines.needs_weights:
            self.team.call("push", self._version)


class Rank0Collector:
    """A `Collector` in the first process of `teams`, which returns its groups in all processes."""

    def __init__(
        self,
        teams: Sequence[Team],
        collector: Collector | None,
        weights: PoolWeights | None = None,
    ) -> None:
        """`teams` are the teams that the first process leads, or the one that this process follows.
        `weights` go to the engines of a pool."""
        self._teams = teams
        self._collector = collector
        self._weights = weights
        self.counts = RolloutCounts()

    def collect(self, step: int, progress: Progress | None = None) -> list[Group]:
        """The scored groups of `step`. Collective."""

        def make(collector: Collector) -> tuple[list[Group], RolloutCounts]:
            def both(finished: int, wanted: int) -> None:
                self._between_steps(finished, wanted)
                if progress is not None:
                    progress(finished, wanted)

            return collector.collect(step, both), collector.counts

        groups, self.counts = self._run(make)
        return groups

    def evaluate(
        self,
        prompts: Sequence[Prompt],
        cfg: EvaluationConfig,
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> list[Sample] | None:
        """Evaluate as `Collector.evaluate`; `should_stop` of the first process counts.
        Collective."""
        between = self._between_steps
        return self._run(
            lambda collector: collector.evaluate(
                prompts, cfg, progress=between, should_stop=should_stop
            )
        )

    def background(self) -> AbstractContextManager[None]:
        """See `Collector.background`."""
        return nullcontext() if self._collector is None else self._collector.background()

    @contextmanager
    def pause(self, version: int) -> Generator[None]:
        """Pause as `Collector.pause`, while the other processes wait. Collective."""
        if self._weights is not None:
            self._weights.trainer_holds(version)
        with ExitStack() as stack:

            def enter(collector: Collector) -> None:
                stack.enter_context(collector.pause(version, self._between_steps))

            self._run(enter)
            yield

    def idle(self) -> AbstractContextManager[None]:
        """See `Collector.idle`."""
        return nullcontext() if self._collector is None else self._collector.idle()

    def state_dict(self) -> dict[str, Any]:
        """State of the first process's collector, which must be idle. Empty in other processes."""
        return {} if self._collector is None else self._collector.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._collector is not None:
            self._collector.load_state_dict(state)

    def _run(self, work: Callable[[Collector], T]) -> T:
        """Result of `work` on the first process's collector, in all processes."""

        def with_own() -> T:
            assert self._collector is not None
            return work(self._collector)

        return run_for(self._teams, with_own)

    def _between_steps(self, finished: int, wanted: int) -> None:
        """Work of the first process between engine steps: recover lost weights, and give the other
        processes a sign of life."""
        del finished, wanted
        if self._weights is not None:
            self._weights.push_if_lost()
        for team in self._teams:
            team.keep_waiting()


class _Ahead(NamedTuple):
    row: Row
    scoring: Future[list[Outputs]]
    number: int
    """Index of the row in the result of `scoring`."""


class Rank0Scorer:
    """A `ScorerPool` in the first process, which returns its scores in all. Implements
    `RowScorer`."""

    def __init__(self, mesh: Mesh, pool: ScorerPool | None, plan: PlanPasses) -> None:
        """`plan` groups rows into forward passes."""
        self._team = Team(mesh, is_first=pool is not None)
        self._pool = pool
        self._plan = plan
        self._ahead: dict[str, _Ahead] = {}
        """Rows whose scoring began before `begin` asked for them, by id."""

    def begin_ahead(self, rows: Sequence[Row], outputs: frozenset[Output]) -> None:
        """Begin to score rows for which `begin` will ask the same `outputs` later. For the first
        process only, from any of its threads. Raises ValueError as `PlanPasses`."""
        assert self._pool is not None
        scoring = self._pool.begin(rows, self._plan(rows), outputs)
        self._ahead |= {row.id: _Ahead(row, scoring, i) for i, row in enumerate(rows)}

    def begin(self, rows: Sequence[Row], outputs: frozenset[Output]) -> Callable[[], list[Outputs]]:
        """Begin to score rows in the background, except those that `begin_ahead` has begun. Returns
        a collective function that waits for the outputs of all rows."""
        passes = self._plan(rows)  # in all processes: raises for rows that are too long
        if self._pool is None:
            return self._team.follow
        ahead = [self._take(row) for row in rows]
        rest = [row for row, begun in zip(rows, ahead, strict=True) if begun is None]
        if len(rest) < len(rows):
            passes = self._plan(rest) if rest else []
        scoring = self._pool.begin(rest, passes, outputs)
        return lambda: self._team.run(lambda: self._outputs(scoring, ahead))

    def _take(self, row: Row) -> _Ahead | None:
        """The scoring that was begun of a row, if the row is still the same."""
        begun = self._ahead.pop(row.id, None)
        is_same = begun is not None and (
            [*begun.row.token_ids] == [*row.token_ids]
            and [*begun.row.loss_mask] == [*row.loss_mask]
            and begun.row.model_input == row.model_input
        )
        return begun if is_same else None

    def _outputs(
        self, scoring: Future[list[Outputs]], ahead: Sequence[_Ahead | None]
    ) -> list[Outputs]:
        futures = [scoring, *(begun.scoring for begun in ahead if begun is not None)]
        while wait(futures, LOOK_S).not_done:
            self._team.keep_waiting()
        rest = iter(scoring.result())
        return [begun.scoring.result()[begun.number] if begun else next(rest) for begun in ahead]
