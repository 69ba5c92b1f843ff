"""The process mesh of training: axes, and the process groups along them.

One process drives one device. Ranks are laid out as `pipeline x data x ring x ulysses x tensor`,
the last varying fastest, so that ranks which communicate most are neighbours:

* ranks along *pipeline* hold different layers, and train the same rows;
* ranks along *data* train different rows;
* ranks along *ring* and *ulysses*, together *context*, hold different tokens of the same rows;
* ranks along *tensor* hold different parts of every layer, and the same tokens.

Weights, gradients and optimizer states of a stage are sharded over groups of `fsdp_size` neighbours
among its ranks that differ in data or context, and replicated over such groups. Experts are split
over `expert` neighbours among the same ranks and those of the tensor axis, which have different
tokens where experts compute, and then sharded over the remaining factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hone.distributed.settings import AxisSizes, ParallelConfig

__all__ = ["Axis", "DisagreementError", "Mesh"]

T = TypeVar("T")


class DisagreementError(RuntimeError):
    """Raised when processes are about to do different things. Their next collective would hang."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the mesh, seen by one rank: the ranks that differ in this coordinate only."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    """Process group for collectives on the device. None if the axis has one rank."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """This process's place among all, with a group for each axis.

    `alone` makes that of one process, `hone.distributed.joined` those of several."""

    device: torch.device
    sizes: AxisSizes = AxisSizes()
    world: Axis = Axis()
    data: Axis = Axis()
    context: Axis = Axis()
    """Ring and ulysses combined, ulysses varying fastest."""
    ring: Axis = Axis()
    ulysses: Axis = Axis()
    tensor: Axis = Axis()
    pipeline: Axis = Axis()
    """The pipeline stages, first to last. Hidden states are sent along this axis."""
    pipeline_back: Axis = Axis()
    """A second group of the same ranks, for the gradients of hidden states: messages of one group
    wait for each other."""
    pipeline_ends: Axis = Axis()
    """The first and the last stage. In other stages an axis of one rank."""
    pipeline_wrap: Axis = Axis()
    """A second group of the ranks of `pipeline_ends`, if stages hold several groups of layers:
    hidden states that have passed all stages are sent from the last to the first."""
    pipeline_wrap_back: Axis = Axis()
    """A third group of these ranks, for the gradients of `pipeline_wrap`."""
    fsdp: DeviceMesh | None = None
    """DeviceMesh [shard], or [replicate, shard] if shards are replicated, of this stage. None with
    one process."""
    tensor_mesh: DeviceMesh | None = None
    """The tensor axis for DTensor. None if it has one rank."""
    expert_mesh: DeviceMesh | None = None
    """The expert axis for DTensor. None if it has one rank."""
    expert_fsdp: DeviceMesh | None = None
    """The mesh as `fsdp`, for the experts of one rank of the expert axis."""
    control: dist.ProcessGroup | None = None
    """CPU group of all processes, for small messages."""

    @classmethod
    def alone(cls, device: torch.device | str) -> Mesh:
        """A mesh of one process."""
        return cls(device=torch.device(device))

    @property
    def is_first(self) -> bool:
        """Whether this is the first process, which writes what is written once."""
        return self.world.rank == 0

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    @property
    def place(self) -> str:
        """Rank and coordinates for file names, as `rank3_dp1_tp1_pp0`."""
        return f"rank{self.rank}_dp{self.data.rank}_tp{self.tensor.rank}_pp{self.pipeline.rank}"

    @property
    def is_last_stage(self) -> bool:
        """Whether this process has the last pipeline stage and so computes the model's outputs."""
        return self.pipeline.rank == self.pipeline.size - 1

    # -- what processes tell each other; with one there is nothing to send -----------------------

    def for_reference(self, cfg: ParallelConfig) -> Mesh:
        """The mesh of the frozen reference model, with its own context axis, fully sharded.
        Collective over all processes. Returns this mesh if the sizes are the same."""
        return self

    @property
    def groups(self) -> set[dist.ProcessGroup]:
        """All process groups in which this process has collectives."""
        return set()

    def total(self, *counts: int) -> tuple[int, ...]:
        """The sum of each count over all processes. Collective, without pickles."""
        return counts

    def gather(self, value: Any, /) -> list[Any]:
        """The picklable `value` of every process, by rank. Collective."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """The picklable `value` of the first process. Collective."""
        return value

    def gather_stages(self, value: Any, /) -> list[Any]:
        """The picklable `value` of every stage, first to last. Collective along pipeline."""
        return [value]

    def share(self, own: Mapping[str, T]) -> dict[str, T]:
        """Merge the named values of all roles' processes. If all processes train the same model,
        only this process's own. Collective."""
        return dict(own)

    def gather_values(self, own_n: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """The values of every rank along data, in rank order, on the CPU.

        `own_n` is [counts[data.rank], ...] on the device. All ranks know all counts. Collective.
        """
        return [own_n.cpu()]

    def agree(self, what: str, value: Any) -> None:
        """Raise DisagreementError on every process unless all have the same `value`. Collective.

        Call it before collectives whose number or shapes depend on `value`.
        """
