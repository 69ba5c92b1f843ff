"""Which processes of a run train the policy, and which a remote critic.

    ranks  0 ... num_trainers - 1      the policy     a world of torch.distributed, with a mesh
           num_trainers ...            the critic     another one, with a mesh of its own
           all                         `everyone`     what a run decides, writes and saves once
           0, num_trainers ...         `lead`         messages of the first process to the critic

Within a role everything is as in a run that trains one model. Messages between roles use channels
outside of their worlds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist

from hone.distributed.channel import Channel
from hone.distributed.joined import JoinedMesh, backend_timeout
from hone.distributed.mesh import Axis, Mesh
from hone.distributed.processes import Processes
from hone.distributed.settings import AxisSizes, ParallelConfig
from hone.distributed.store import connect

__all__ = ["CriticProcesses", "Everyone", "LearningRole", "Roles"]

T = TypeVar("T")
LearningRole = Literal["policy", "critic"]


class CriticProcesses(NamedTuple):
    """The processes of a remote critic."""

    number: int
    parallel: ParallelConfig
    """Parallelism of the critic."""


@dataclass(frozen=True, slots=True)
class Everyone(JoinedMesh):
    """All processes of a run whose roles have separate worlds. For messages only."""

    channel: Channel | None = None
    firsts: tuple[int, ...] = (0,)
    """Ranks of the first process of every role."""

    @property
    def _channel(self) -> Channel:
        assert self.channel is not None
        return self.channel

    def total(self, *counts: int) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self._channel.gather(counts), strict=True)))

    def gather(self, value: Any, /) -> list[Any]:
        return self._channel.gather(value)

    def broadcast(self, value: Any) -> Any:
        return self._channel.broadcast(value)

    def share(self, own: Mapping[str, T]) -> dict[str, T]:
        shared: dict[str, T] = {}
        for first in reversed(self.firsts):  # on equal names the policy's value wins
            shared |= self._channel.broadcast(own, first)
        return shared


@dataclass(frozen=True, slots=True)
class Roles:
    """The role of this process and its meshes."""

    own: LearningRole
    mesh: Mesh
    """The process mesh of this process's role."""
    everyone: Mesh
    """All processes of the run. The same as `mesh` if there is only one role."""
    lead: Channel | None = None
    """Channel of the first process and the critic's processes. None in others."""

    @property
    def channels(self) -> list[Channel]:
        """Channels in which this process has calls."""
        joint = [self.everyone.channel] if isinstance(self.everyone, Everyone) else []
        return [channel for channel in (*joint, self.lead) if channel is not None]

    @property
    def num_trainers(self) -> int:
        """Number of processes that train the policy."""
        return self.everyone.sizes.world

    @classmethod
    def join(
        cls,
        cfg: ParallelConfig,
        own: Processes,
        device: torch.device,
        *,
        critic: CriticProcesses | None = None,
    ) -> Self:
        """Join the other processes. With `critic`, the last ones train it; the others train the
        policy, with the parallelism of `cfg`. Collective.

        Raises UserError as `JoinedMesh.join`, before any process waits for another.
        """
        if critic is None:
            mesh = JoinedMesh.join(cfg, own, device)
            return cls("policy", mesh, mesh)
        num_trainers = own.world_size - critic.number
        sizes = AxisSizes.of(cfg, num_trainers), AxisSizes.of(critic.parallel, critic.number)
        is_critic = own.rank >= num_trainers
        within = replace(
            own,
            rank=own.rank - num_trainers * is_critic,
            world_size=sizes[is_critic].world,
        )
        role: LearningRole = "critic" if is_critic else "policy"
        store = dist.PrefixStore("roles", connect(own))
        mesh = JoinedMesh.join(
            critic.parallel if is_critic else cfg,
            within,
            device,
            store=dist.PrefixStore(role, store),
        )
        critics = range(num_trainers, own.world_size)
        channel = Channel("everyone", store, range(own.world_size), own.rank, backend_timeout(cfg))
        everyone = Everyone(
            device,
            sizes[0],
            world=Axis(own.rank, own.world_size),
            data=mesh.data,
            tensor=mesh.tensor,
            pipeline=mesh.pipeline,
            channel=channel,
            firsts=(0, critics[0]),
        )
        lead = None
        if is_critic or own.rank == 0:
            lead = Channel("lead", store, [0, *critics], own.rank, backend_timeout(cfg))
        return cls(role, mesh, everyone, lead)
