"""Who of a run's processes trains the policy, and who a critic with devices of its own.

    ranks  0 ... num_trainers - 1      the policy     a world of torch.distributed, with a mesh
           num_trainers ...            the critic     another one, with a mesh of its own
           all                         `everyone`     what a run decides, writes and saves once
           0, num_trainers ...         `lead`         what the first process tells the critic's

Within a role everything is as in a run that trains one model. What roles tell each other goes over
channels beside their worlds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist

from hone.config.parallel import AxisSizes, ParallelConfig
from hone.distributed.channel import Channel
from hone.distributed.mesh import Axis, Mesh, patience
from hone.distributed.processes import Processes
from hone.distributed.watch import connect

__all__ = ["CriticProcesses", "Everyone", "LearningRole", "Roles"]

T = TypeVar("T")
LearningRole = Literal["policy", "critic"]


class CriticProcesses(NamedTuple):
    """Those that a critic has for itself."""

    number: int
    parallel: ParallelConfig
    """How they divide it."""


@dataclass(frozen=True, slots=True)
class Everyone(Mesh):
    """All processes of a run whose roles have worlds of their own; for messages alone."""

    channel: Channel | None = None
    firsts: tuple[int, ...] = (0,)
    """The first process of every role."""

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
        for first in reversed(self.firsts):  # what several have is the policy's
            shared |= self._channel.broadcast(own, first)
        return shared


@dataclass(frozen=True, slots=True)
class Roles:
    """This process's place."""

    own: LearningRole
    mesh: Mesh
    """The processes that train what this one trains."""
    everyone: Mesh
    """All processes: `mesh`, where all train the same."""
    lead: Channel | None = None
    """The first process and those of the critic, in these alone."""

    @property
    def channels(self) -> list[Channel]:
        """Those that this process has calls in."""
        joint = [self.everyone.channel] if isinstance(self.everyone, Everyone) else []
        return [channel for channel in (*joint, self.lead) if channel is not None]

    @property
    def num_trainers(self) -> int:
        """Processes that train the policy."""
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
        """Meet the other processes, of which the last train the critic, where that has some; the
        others train the policy, divided as `cfg` says. Collective.

        Raises UserError as `Mesh.join`, before any process waits for another.
        """
        if critic is None:
            mesh = Mesh.join(cfg, own, device)
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
        mesh = Mesh.join(
            critic.parallel if is_critic else cfg,
            within,
            device,
            store=dist.PrefixStore(role, store),
        )
        critics = range(num_trainers, own.world_size)
        channel = Channel("everyone", store, range(own.world_size), own.rank, patience(cfg))
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
            lead = Channel("lead", store, [0, *critics], own.rank, patience(cfg))
        return cls(role, mesh, everyone, lead)
