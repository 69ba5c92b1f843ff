"""What the processes of a rollout tell each other: their groups, and how far they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from hone.distributed.mesh import Mesh

__all__ = ["Exchange"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Exchange:
    """The peers of a rollout (`hone.rollout.rollout.Peers`), over the mesh's control group."""

    mesh: Mesh

    @property
    def rank(self) -> int:
        return self.mesh.world.rank

    @property
    def size(self) -> int:
        return self.mesh.world.size

    def gather(self, value: T, /) -> list[T]:
        """The picklable value of every process, by rank. Collective."""
        return self.mesh.gather(value)

    def total(self, *counts: int) -> tuple[int, ...]:
        """Each count, added up over all processes. Collective, without pickles."""
        if self.size == 1:
            return counts
        totals = torch.tensor(counts, dtype=torch.int64)
        dist.all_reduce(totals, group=self.mesh.control)
        return tuple(totals.tolist())
