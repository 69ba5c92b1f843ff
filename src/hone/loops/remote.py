"""The parts of a run that use pools of workers with weights of their own.

All training processes make these parts. Only the first one has the `Pools`; in the others they are
None, and the parts wait for the first process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from hone.config.cluster import ClusterConfig
from hone.config.tree import RLConfig
from hone.data.prompts import PromptData
from hone.distributed.mesh import Mesh
from hone.distributed.pool import RecordEvent
from hone.loops.rank0 import Controller, Rank0Collector, Rank0Reference
from hone.rewards.scorer import Scorer
from hone.rollout.buffer import Progress
from hone.rollout.collector import Collector
from hone.rollout.counts import RolloutCounts
from hone.rollout.engine_pool import EnginePool
from hone.rollout.requests import Decode
from hone.rollout.scorer_pool import ScorerPool
from hone.trainer.trainer import Trainer
from hone.types import Group, SamplingEngine, Trajectory
from hone.weights.broadcast import BroadcastSync
from hone.weights.sync import SyncReport

__all__ = [
    "Collects",
    "MakePools",
    "Pools",
    "Pushes",
    "Sampling",
    "reference_apart",
    "sampling_apart",
    "weights_to",
]


@dataclass(frozen=True, slots=True)
class Pools:
    """The workers with weights of their own, by role."""

    engines: EnginePool
    """Empty where each training process drives an engine on its device."""
    host: str
    """How workers reach this process."""
    references: ScorerPool | None = None

    def report_to(self, event: RecordEvent) -> None:
        """Call `event` for each worker that is lost from now on, as `Pool.report_to`."""
        self.engines.report_to(event)
        if self.references is not None:
            self.references.report_to(event)


MakePools = Callable[[RLConfig], AbstractContextManager[Pools]]
"""Starts them; they end with the context."""


class Collects(Protocol):
    """A `Collector` of this process, or of the first one."""

    @property
    def counts(self) -> RolloutCounts: ...
    def collect(self, step: int, progress: Progress | None = None, /) -> list[Group]: ...
    def background(self) -> AbstractContextManager[None]: ...
    def pause(self, version: int, /) -> AbstractContextManager[None]: ...
    def idle(self) -> AbstractContextManager[None]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Pushes(Protocol):
    """How weights reach all engines."""

    def push(self, version: int) -> SyncReport: ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """The side of a run that samples."""

    engine: SamplingEngine | None
    collector: Collects
    weights: Pushes
    controller: Controller | None = None


def weights_to(
    pools: Pools | None, cfg: ClusterConfig, trainer: Trainer, mesh: Mesh
) -> BroadcastSync:
    """How the trainers' weights reach engines."""
    return BroadcastSync(
        trainer,
        mesh,
        pools and pools.engines,
        bucket_bytes=cfg.update_weight_buffer_size,
        timeout_s=cfg.engine_timeout_s,
        host=pools.host if pools else "",
    )


def sampling_apart(
    cfg: RLConfig,
    controller: Controller,
    scorer: Scorer | None,
    data: PromptData,
    decode: Decode,
) -> Sampling:
    """The rollout of engines, which the first process drives, as it drives the scorer."""
    engines, collector = controller.engines, None
    if engines is not None and scorer is not None:
        collector = Collector(
            engines,
            scorer,
            data.train,
            cfg.rollout,
            cfg.pipeline,
            decode,
            cfg.run.seed,
            cfg.reward.max_failure_rate,
        )
    return Sampling(engines, Rank0Collector(controller, collector), controller, controller)


def reference_apart(
    cfg: ClusterConfig, pools: Pools | None, trainer: Trainer, mesh: Mesh
) -> Rank0Reference | None:
    """The reference where it has devices of its own; None where the trainers have it."""
    if not cfg.num_references:
        return None
    references = pools and pools.references
    assert references is not None or not mesh.is_first, "the references have not been started"

    def plan(rows: Sequence[Trajectory]) -> list[list[int]]:
        return trainer.batcher.plan_reference_passes(rows, cfg.num_references)

    return Rank0Reference(mesh, references, plan)
