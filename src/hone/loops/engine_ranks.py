"""Colocated engines over several training processes: which process is which rank of which
engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch.distributed as dist

from hone.distributed.channel import GroupChannel
from hone.distributed.joined import BACKSTOP_S, new_group
from hone.distributed.mesh import Mesh
from hone.distributed.team import Team
from hone.images.sending import with_pixels
from hone.models.tensor_parallel import TensorParallel
from hone.rollout.comm import Comm, SingleProcess
from hone.types import Completion, EngineStats, Request, SamplingEngine

__all__ = ["EngineRanks", "LedEngine"]


@dataclass(frozen=True, slots=True)
class EngineRanks:
    """This process's rank in a tensor-parallel engine of `tp.size` neighbouring processes, and the
    place of that engine among the others.

    The first rank of each engine draws prompts, samples and scores; the others follow it.
    """

    tp: TensorParallel
    comm: Comm
    """Communicator between the first ranks of all engines. Not usable in other ranks."""
    groups: frozenset[dist.ProcessGroup] = frozenset()
    """Process groups in which this process has collectives, in addition to those of the mesh."""
    _channel: GroupChannel | None = None
    """Channel between the ranks of this engine."""

    @classmethod
    def join(cls, size: int, mesh: Mesh, *, timeout_s: float) -> Self:
        """Join the other ranks. Collective over the mesh, whose size must be a multiple of
        `size`."""
        if size == 1:
            return cls(TensorParallel.from_environment(1, mesh.device), mesh)
        patience = timedelta(seconds=timeout_s + BACKSTOP_S)
        tp = TensorParallel.from_environment(size, mesh.device, timeout=patience)
        starts = range(0, mesh.size, size)
        lines = [[*range(start, start + size)] for start in starts]
        engines = [new_group(line, patience) for line in lines]
        own, firsts = engines[mesh.rank // size], new_group([*starts], patience)
        assert tp.group is not None
        assert own is not None
        groups = {own, tp.group}
        comm: Comm = SingleProcess()
        if firsts is not None:  # this process is a first rank
            comm = GroupChannel(firsts)
            groups.add(firsts)
        return cls(tp, comm, frozenset(groups), GroupChannel(own))

    @property
    def is_first(self) -> bool:
        """Whether this process drives its engine."""
        return self.tp.rank == 0

    def team(self, engine: SamplingEngine, others: Mapping[str, Callable[..., Any]]) -> Team:
        """Team of the ranks of `engine`, which repeat the calls of their first rank: the engine's,
        and `others` by name."""
        calls = {"submit": engine.submit, "abort": engine.abort, "step": engine.step}
        return Team(self._channel, is_first=self.is_first, calls={**calls, **others})


class LedEngine:
    """The `SamplingEngine` of the first rank of a `team`, whose calls the other ranks repeat."""

    def __init__(self, engine: SamplingEngine, team: Team) -> None:
        self._engine = engine
        self._team = team

    @property
    def weight_version(self) -> int:
        return self._engine.weight_version

    @property
    def has_unfinished(self) -> bool:
        return self._engine.has_unfinished

    def submit(self, requests: Sequence[Request]) -> None:
        """Submit here now, and on the other ranks before their next step."""
        self._team.later("submit", with_pixels(requests))

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        """Abort here now, and on the other ranks before their next step."""
        return self._team.later("abort", list(request_ids))

    def step(self) -> list[Completion]:
        """Step all ranks. See `SamplingEngine.step`."""
        return self._team.call("step")

    def stats(self) -> EngineStats:
        return self._engine.stats()
