"""How the processes of a run share the work of training: axes, and the groups along them.

One process drives one device. Ranks are laid out as `pipeline x data x ring x ulysses x tensor`,
the last fastest, so that the axes that talk most lie closest together:

* ranks along *pipeline* hold different layers, and train the same rows;
* ranks along *data* train different rows;
* ranks along *ring* and *ulysses*, together *context*, hold different tokens of the same rows;
* ranks along *tensor* hold different parts of every layer, and the same tokens.

Weights, gradients and optimizer states of a stage are sharded over groups of `fsdp_size` neighbours
among its ranks that differ in data or context, and replicated over such groups. Of experts,
`expert` neighbours among the same ranks hold different ones, and shards lie over what is left.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hone.config.parallel import AxisSizes, ParallelConfig
from hone.distributed.channel import broadcast, gather
from hone.distributed.processes import Processes
from hone.distributed.watch import BACKSTOP_S, LostPeerError, connect

__all__ = ["Axis", "DisagreementError", "Mesh", "new_group", "patience"]

T = TypeVar("T")
_INTERFACES = (
    "Each host announces the address of one network interface: gloo that of the host's name, NCCL "
    "one that it finds. Where others cannot reach it, name the right one (`ip -br address` lists "
    "them) in the environment of every process: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."
)


class DisagreementError(RuntimeError):
    """Processes were about to do different things. Their next collective would have hung."""


@dataclass(frozen=True, slots=True)
class Axis:
    """The ranks that differ in one coordinate only, as seen by one of them."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    """For collectives on the device; None where the axis has one rank."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """This process's place among all, with a group for each axis."""

    device: torch.device
    sizes: AxisSizes = AxisSizes()
    world: Axis = Axis()
    data: Axis = Axis()
    context: Axis = Axis()
    """Ring and ulysses together, ulysses fastest."""
    ring: Axis = Axis()
    ulysses: Axis = Axis()
    tensor: Axis = Axis()
    pipeline: Axis = Axis()
    """The stages, first to last; hidden states travel along it."""
    pipeline_back: Axis = Axis()
    """The same ranks in a group of its own, along which gradients of hidden states travel: messages
    of one group wait for each other."""
    pipeline_ends: Axis = Axis()
    """The first and the last stage; one rank in those between."""
    pipeline_wrap: Axis = Axis()
    """As `pipeline_ends`, where stages hold several groups of layers: hidden states that have
    passed all stages travel from the last to the first."""
    pipeline_wrap_back: Axis = Axis()
    """The same again, for gradients of these."""
    fsdp: DeviceMesh | None = None
    """[shard], or [replicate, shard] where shards have copies, of this stage; None with one
    process."""
    tensor_mesh: DeviceMesh | None = None
    """The tensor axis for DTensor; None where it has one rank."""
    expert_mesh: DeviceMesh | None = None
    """The expert axis for DTensor; None where it has one rank."""
    expert_fsdp: DeviceMesh | None = None
    """As `fsdp`, for the experts that a rank of that axis holds."""
    control: dist.ProcessGroup | None = None
    """All processes, for small messages between hosts' memories."""

    @classmethod
    def alone(cls, device: torch.device | str) -> Mesh:
        """One process that shares with nobody."""
        return cls(device=torch.device(device))

    @classmethod
    def join(
        cls,
        cfg: ParallelConfig,
        own: Processes,
        device: torch.device,
        *,
        store: dist.Store | None = None,
    ) -> Mesh:
        """Meet the other processes that torchrun started, or in `store` those that `own` is one of.
        With one process nothing is set up. The store waits from then on as long as `cfg` says.

        Collective: every process calls it, once. Raises UserError as `AxisSizes.of` does, before
        any process waits for another, and LostPeerError where they do not reach each other.
        """
        sizes = AxisSizes.of(cfg, own.world_size)
        if own.world_size == 1:
            return cls.alone(device)
        timeout = patience(cfg)
        if not dist.is_initialized():
            is_cuda = device.type == "cuda"
            # By itself torch would serve a store at all interfaces.
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
        """The mesh over the process group that is already there."""
        rank = dist.get_rank()
        ranks = np.arange(sizes.world)
        stages = sizes.pipeline
        axes = ranks.reshape(stages, sizes.data, sizes.ring, sizes.ulysses, sizes.tensor)
        shards = ranks.reshape(stages, -1, sizes.fsdp, sizes.tensor)
        stage = rank // (sizes.world // stages)
        groups = _Groups(timeout)
        # Groups that DeviceMesh makes itself do not take this deadline.
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
        """The mesh of the frozen reference model: its own context axis, fully sharded.

        Collective over all processes. This mesh itself where the sizes are the same.
        """
        sizes = AxisSizes.of(cfg.for_reference, self.sizes.world)
        if sizes == self.sizes:
            return self
        return Mesh.of_group(sizes, self.device, timeout=patience(cfg))

    @property
    def groups(self) -> set[dist.ProcessGroup]:
        """Every group that this process has collectives in."""
        axes = (self.world, self.data, self.context, self.ring, self.ulysses, self.tensor)
        axes += self.pipeline, self.pipeline_back, self.pipeline_ends
        axes += self.pipeline_wrap, self.pipeline_wrap_back
        found = {self.control, *(axis.group for axis in axes)}
        for devices in (self.fsdp, self.tensor_mesh, self.expert_fsdp, self.expert_mesh):
            found.update(devices.get_all_groups() if devices is not None else [])
        return {group for group in found if group is not None}

    @property
    def is_first(self) -> bool:
        """Whether this is the one process that writes what is written once."""
        return self.world.rank == 0

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    @property
    def place(self) -> str:
        """The rank and its coordinates, for names of files: `rank3_dp1_tp1_pp0`."""
        return f"rank{self.rank}_dp{self.data.rank}_tp{self.tensor.rank}_pp{self.pipeline.rank}"

    @property
    def is_last_stage(self) -> bool:
        """Whether this process computes what a model says of tokens; with one stage it does."""
        return self.pipeline.rank == self.pipeline.size - 1

    def total(self, *counts: int) -> tuple[int, ...]:
        """Each count, added up over all processes. Collective, without pickles."""
        if self.world.size == 1:
            return counts
        totals = torch.tensor(counts, dtype=torch.int64)
        dist.all_reduce(totals, group=self.control)
        return tuple(totals.tolist())

    def gather(self, value: Any, /) -> list[Any]:
        """The picklable `value` of every process, by rank. Collective."""
        if self.world.size == 1:
            return [value]
        return gather(self.control, value)

    def broadcast(self, value: Any) -> Any:
        """The picklable `value` of the first process. Collective."""
        if self.world.size == 1:
            return value
        return broadcast(self.control, value)

    def gather_stages(self, value: Any, /) -> list[Any]:
        """The picklable `value` of every stage, first to last. Collective along pipeline."""
        if self.pipeline.size == 1:
            return [value]
        return gather(self.pipeline.group, value)

    def share(self, own: Mapping[str, T]) -> dict[str, T]:
        """What this process has by name, with what those have that train another model: where all
        train the same, nothing. Collective."""
        return dict(own)

    def gather_values(self, own_n: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """The values of every rank along data, in rank order, on the CPU.

        `own_n` is [counts[data.rank], ...] on the device; all ranks know all counts. Collective.
        """
        if self.data.size == 1:
            return [own_n.cpu()]
        padded = own_n.new_zeros(max(counts), *own_n.shape[1:])
        padded[: len(own_n)] = own_n
        everywhere = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(everywhere, padded, group=self.data.group)
        return [values[:n].cpu() for values, n in zip(everywhere, counts, strict=True)]

    def agree(self, what: str, value: Any) -> None:
        """Raise DisagreementError, on every process, unless all bring the same `value`.

        Collective. Call it before collectives whose number or shapes follow from `value`.
        """
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
    """Let neighbouring stages connect; nothing with one rank. NCCL does so at their first message,
    and holds both up until they have: in a step one may wait for something else of the other by
    then."""
    nothing = torch.zeros(1, device=device)
    if ahead.rank > 0:
        dist.recv(nothing, group=ahead.group, group_src=ahead.rank - 1)
    if ahead.rank < ahead.size - 1:
        dist.send(nothing, group=ahead.group, group_dst=ahead.rank + 1)
        dist.recv(nothing, group=back.group, group_src=back.rank + 1)
    if back.rank > 0:
        dist.send(nothing, group=back.group, group_dst=back.rank - 1)


def patience(cfg: ParallelConfig) -> timedelta:
    """The backend's own timeout: for when the watch, which names whom it missed, has failed."""
    return timedelta(seconds=cfg.timeout_s + BACKSTOP_S)


def _lines(ranks: NDArray[np.int64], *dims: int) -> NDArray[np.int64]:
    """Ranks that differ in `dims` alone, [lines, ranks of a line]."""
    size = prod(ranks.shape[dim] for dim in dims)
    return np.moveaxis(ranks, dims, range(-len(dims), 0)).reshape(-1, size)


class _Groups:
    """Groups of a mesh. Axes over the same ranks share one: each communicator takes time to set up
    and memory of every GPU in it."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def own(self, lines: NDArray[np.int64]) -> dist.ProcessGroup:
        """The group of the line that holds this process."""
        self._make(lines)
        rank = dist.get_rank()
        own = next(self._made[line] for line in map(tuple, lines.tolist()) if rank in line)
        assert own is not None
        return own

    def along(self, lines: NDArray[np.int64]) -> Axis:
        """This process's place on the line that holds it; one rank where none does."""
        if lines.shape[1] == 1:
            return Axis()
        self._make(lines)
        rank = dist.get_rank()
        for line in map(tuple, lines.tolist()):
            if rank in line:
                return Axis(line.index(rank), len(line), self._made[line])
        return Axis()

    def _make(self, lines: NDArray[np.int64]) -> None:
        """Every process makes all groups, in the same order, as torch.distributed demands."""
        for line in map(tuple, lines.tolist()):
            if line not in self._made:
                self._made[line] = new_group([*line], self._timeout)


def new_group(
    ranks: list[int], timeout: timedelta, backend: str | None = None
) -> dist.ProcessGroup | None:
    """Collective over all processes; None for those that are not in it.

    A group of some of them has the backends of all: those outside take part in a split of NCCL's
    communicator whatever `backend` says (torch 2.11 to 2.13), and would wait for it for ever.
    """
    assert backend is None or len(ranks) == dist.get_world_size(), f"{backend=} {ranks=}"
    group = dist.new_group(ranks, timeout=timeout, backend=backend)
    return group if isinstance(group, dist.ProcessGroup) else None


def _shorten(value: Any, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
