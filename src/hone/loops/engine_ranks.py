"""Engines over the processes of a command, one device each: who is which rank of which."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist

from hone.distributed.mesh import Mesh, new_group
from hone.distributed.watch import BACKSTOP_S
from hone.engine.lockstep import LockStepEngine
from hone.engine.worker import LockStep
from hone.loops.rank0 import EngineLead
from hone.models.tensor_parallel import TensorParallel
from hone.rollout.comm import Comm, SingleProcess
from hone.types import SamplingEngine

__all__ = ["EngineRanks"]


@dataclass(frozen=True, slots=True)
class EngineRanks:
    """This process's place in an engine over `tp.size` neighbours of a mesh, and that engine's
    among the others.

    The first rank of each engine draws prompts, samples and scores; the others follow it.
    """

    tp: TensorParallel
    comm: Comm
    """The engines, by their first ranks; of no use in others."""
    groups: frozenset[dist.ProcessGroup] = frozenset()
    """In which this process has collectives, besides those of the mesh."""
    _lock_step: LockStep | None = None

    @classmethod
    def join(cls, size: int, mesh: Mesh, *, timeout_s: float) -> Self:
        """Meet the other ranks. Collective over the mesh, whose size `size` divides."""
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
        if firsts is not None:  # else this process is none of them
            comm = _Engines(firsts)
            groups.add(firsts)
        return cls(tp, comm, frozenset(groups), LockStep(own))

    @property
    def is_first(self) -> bool:
        """Whether this process drives its engine."""
        return self.tp.rank == 0

    def lead(self, engine: SamplingEngine) -> EngineLead:
        """How the first rank works for all ranks of `engine`."""
        return EngineLead(LockStepEngine(engine, self._lock_step), self.is_first)


class _Engines(LockStep):
    """The `Comm` of the engines' first ranks."""

    def total(self, *counts: int) -> tuple[int, ...]:
        totals = torch.tensor(counts, dtype=torch.int64)
        dist.all_reduce(totals, group=self._group)
        return tuple(totals.tolist())
