"""The mesh of several processes: rendezvous, process groups of its axes, and messages."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hone.distributed.channel import broadcast, gather
from hone.distributed.mesh import Axis, DisagreementError, Mesh
from hone.distributed.processes import Processes
from hone.distributed.settings import AxisSizes, ParallelConfig
from hone.distributed.store import LostPeerError, connect

__all__ = ["BACKSTOP_S", "JoinedMesh", "backend_timeout", "new_group"]

BACKSTOP_S = 15.0
"""Seconds by which the backend's own timeout exceeds the watch's, since only the watch can name the
missing rank."""
_INTERFACES = (
    "Each host announces the address of one network interface: gloo that of the host's name, NCCL "
    "one that it finds. Where others cannot reach it, name the right one (`ip -br address` lists "
    "them) in the environment of every process: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."
)


@dataclass(frozen=True, slots=True)
class JoinedMesh(Mesh):
    """The mesh of a process among several."""

    @classmethod
    def join(
        cls,
        cfg: ParallelConfig,
        own: Processes,
        device: torch.device,
        *,
        store: dist.Store | None = None,
    ) -> Mesh:
        """Join the other processes that torchrun started, or the processes of `store`.

        A single process sets up nothing. From then on the store's timeout is that of `cfg`.
        Collective: every process calls it once. Raises UserError as `AxisSizes.of` does, before any
        process waits for another, and LostPeerError if they cannot reach each other.
        """
        sizes = AxisSizes.of(cfg, own.world_size)
        if own.world_size == 1:
            return Mesh.alone(device)
        timeout = backend_timeout(cfg)
        if not dist.is_initialized():
            is_cuda = device.type == "cuda"
            # By default torch would serve a store on all interfaces.
            store = dist.PrefixStore("mesh", connect(own)) if store is None else store
            store.set_timeout(timeout)
            try:
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
                    timeout=timeout,
                    device_id=device if is_cuda else None,
                    store=store,
                    rank=own.rank,
                    world_size=own.world_size,
                )
            except RuntimeError as error:
                raise LostPeerError(
                    f"rank {own.rank} on {socket.gethostname()} could not connect to the other "
                    f"{own.world_size - 1} processes: {error}. {_INTERFACES}"
                ) from error
        return cls.of_group(sizes, device, timeout=timeout)

    @classmethod
    def of_group(cls, sizes: AxisSizes, device: torch.device, *, timeout: timedelta) -> Mesh:
        """Build the mesh over the existing default process group."""
        rank = dist.get_rank()
        ranks = np.arange(sizes.world)
        stages = sizes.pipeline
        axes = ranks.reshape(stages, sizes.data, sizes.ring, sizes.ulysses, sizes.tensor)
        shards = ranks.reshape(stages, -1, sizes.fsdp, sizes.tensor)
        stage = rank // (sizes.world // stages)
        groups = _Groups(timeout)
        # Groups that DeviceMesh creates itself would not have this timeout.
        sharded = DeviceMesh.from_group(
            [groups.own(_lines(shards, dim)) for dim in (1, 2, 3)],
            device.type,
            torch.from_numpy(shards[stage]),
            mesh_dim_names=("replicate", "shard", "tensor"),
        )

        divided = None
        if sizes.expert > 1:
            experts = ranks.reshape(stages, -1, sizes.expert_fsdp, sizes.expert)
            divided = DeviceMesh.from_group(
                [groups.own(_lines(experts, dim)) for dim in (1, 2, 3)],
                device.type,
                torch.from_numpy(experts[stage]),
                mesh_dim_names=("replicate", "shard", "expert"),
            )

        def along(*dims: int) -> Axis:
            return groups.along(_lines(axes, *dims))

        back = ends = wrap = wrap_back = Axis()
        if stages > 1:
            lines = _lines(axes, 0)
            back = _Groups(timeout).along(lines)
            ends = groups.along(lines[:, [0, -1]])
            if sizes.virtual_stages > 1:
                wrap, wrap_back = (_Groups(timeout).along(lines[:, [0, -1]]) for _ in range(2))
            _connect_stages(along(0), back, device)
            _connect_stages(wrap_back, wrap, device)
        return cls(
            device=device,
            sizes=sizes,
            world=Axis(rank, sizes.world, dist.group.WORLD),
            data=along(1),
            context=along(2, 3),
            ring=along(2),
            ulysses=along(3),
            tensor=along(4),
            pipeline=along(0),
            pipeline_back=back,
            pipeline_ends=ends,
            pipeline_wrap=wrap,
            pipeline_wrap_back=wrap_back,
            fsdp=sharded["shard"] if shards.shape[1] == 1 else sharded["replicate", "shard"],
            tensor_mesh=sharded["tensor"] if sizes.tensor > 1 else None,
            expert_mesh=divided["expert"] if divided is not None else None,
            expert_fsdp=divided["replicate", "shard"] if divided is not None else None,
            control=new_group(ranks.tolist(), timeout, backend="gloo"),
        )

    def for_reference(self, cfg: ParallelConfig) -> Mesh:
        sizes = AxisSizes.of(cfg.for_reference, self.sizes.world)
        if sizes == self.sizes:
            return self
        return JoinedMesh.of_group(sizes, self.device, timeout=backend_timeout(cfg))

    @property
    def groups(self) -> set[dist.ProcessGroup]:
        axes = (self.world, self.data, self.context, self.ring, self.ulysses, self.tensor)
        axes += self.pipeline, self.pipeline_back, self.pipeline_ends
        axes += self.pipeline_wrap, self.pipeline_wrap_back
        found = {self.control, *(axis.group for axis in axes)}
        for devices in (self.fsdp, self.tensor_mesh, self.expert_fsdp, self.expert_mesh):
            found.update(devices.get_all_groups() if devices is not None else [])
        return {group for group in found if group is not None}

    def total(self, *counts: int) -> tuple[int, ...]:
        totals = torch.tensor(counts, dtype=torch.int64)
        dist.all_reduce(totals, group=self.control)
        return tuple(totals.tolist())

    def gather(self, value: Any, /) -> list[Any]:
        return gather(self.control, value)

    def broadcast(self, value: Any) -> Any:
        return broadcast(self.control, value)

    def gather_stages(self, value: Any, /) -> list[Any]:
        if self.pipeline.size == 1:
            return [value]
        return gather(self.pipeline.group, value)

    def gather_values(self, own_n: Tensor, counts: Sequence[int]) -> list[Tensor]:
        if self.data.size == 1:
            return [own_n.cpu()]
        padded = own_n.new_zeros(max(counts), *own_n.shape[1:])
        padded[: len(own_n)] = own_n
        everywhere = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(everywhere, padded, group=self.data.group)
        return [values[:n].cpu() for values, n in zip(everywhere, counts, strict=True)]

    def agree(self, what: str, value: Any) -> None:
        values = self.gather(value)
        differing = [rank for rank, other in enumerate(values) if other != values[0]]
        if differing:
            raise DisagreementError(
                f"processes disagree on {what}: rank 0 has {_shorten(values[0])}, "
                f"rank {differing[0]} has {_shorten(values[differing[0]])}"
                + (f" (and {len(differing) - 1} others differ)" if len(differing) > 1 else "")
                + "; nothing was sent. Do all run the same configuration on the same data?"
            )


def _connect_stages(ahead: Axis, back: Axis, device: torch.device) -> None:
    """Connect neighbouring stages before the first step.

    NCCL connects at the first message and blocks both sides until done. In a step one side may wait
    for another message of the other side by then: a deadlock.
    """
    nothing = torch.zeros(1, device=device)
    if ahead.rank > 0:
        dist.recv(nothing, group=ahead.group, group_src=ahead.rank - 1)
    if ahead.rank < ahead.size - 1:
        dist.send(nothing, group=ahead.group, group_dst=ahead.rank + 1)
        dist.recv(nothing, group=back.group, group_src=back.rank + 1)
    if back.rank > 0:
        dist.send(nothing, group=back.group, group_dst=back.rank - 1)


def backend_timeout(cfg: ParallelConfig) -> timedelta:
    """The backend's own timeout, which applies only if the watch, which names missing ranks, has
    failed."""
    return timedelta(seconds=cfg.timeout_s + BACKSTOP_S)


def _lines(ranks: NDArray[np.int64], *dims: int) -> NDArray[np.int64]:
    """Ranks that differ only in `dims`, shape [lines, ranks per line]."""
    size = prod(ranks.shape[dim] for dim in dims)
    return np.moveaxis(ranks, dims, range(-len(dims), 0)).reshape(-1, size)


class _Groups:
    """The process groups of a mesh. Axes over the same ranks share one group: each communicator
    takes time to set up and memory on every GPU in it."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def own(self, lines: NDArray[np.int64]) -> dist.ProcessGroup:
        """The group of the line that contains this process."""
        self._make(lines)
        rank = dist.get_rank()
        own = next(self._made[line] for line in map(tuple, lines.tolist()) if rank in line)
        assert own is not None
        return own

    def along(self, lines: NDArray[np.int64]) -> Axis:
        """The axis of the line that contains this process. One rank if no line does."""
        if lines.shape[1] == 1:
            return Axis()
        self._make(lines)
        rank = dist.get_rank()
        for line in map(tuple, lines.tolist()):
            if rank in line:
                return Axis(line.index(rank), len(line), self._made[line])
        return Axis()

    def _make(self, lines: NDArray[np.int64]) -> None:
        """Create the groups of all lines. torch.distributed requires every process to create all
        groups in the same order."""
        for line in map(tuple, lines.tolist()):
            if line not in self._made:
                self._made[line] = new_group([*line], self._timeout)


def new_group(
    ranks: list[int], timeout: timedelta, backend: str | None = None
) -> dist.ProcessGroup | None:
    """Create a process group. Collective over all processes; None for those that are not in it.

    `backend` must be None for a group of some processes, which then has the backends of the world.
    When NCCL's communicator is split, processes outside the group take part whatever `backend` says
    (torch 2.11 to 2.13), and would wait forever.
    """
    assert backend is None or len(ranks) == dist.get_world_size(), f"{backend=} {ranks=}"
    group = dist.new_group(ranks, timeout=timeout, backend=backend)
    return group if isinstance(group, dist.ProcessGroup) else None


def _shorten(value: Any, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
