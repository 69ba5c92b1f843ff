"""Gathering of whole tensors from the shards of all processes, many in one collective.

A model of 8B weights has 399 tensors, most of them small: gathered one by one, each costs more time
in launches and in waiting for the other processes than in the transfer of bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate, groupby, pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from hone.trainer.row_shares import gather_rows

__all__ = ["whole", "wholes"]

_Axes = dict[tuple[DeviceMesh, tuple[Placement, ...]], dist.ProcessGroup | None]

GATHER_BYTES = 1 << 27
"""Bytes of whole tensors that are gathered in one collective; a larger tensor is gathered alone."""


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered from all processes that have parts of it. Collective."""
    if not isinstance(tensor, DTensor):
        return tensor
    local, grid = tensor.to_local(), tensor.device_mesh
    if local.device.type != grid.device_type:  # offloaded; collectives run on the devices
        tensor = DTensor.from_local(
            local,
            grid,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    # One axis after the other, in the order in which the shards were cut.
    placements = list(tensor.placements)
    for dim in range(len(placements)):
        placements[dim] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def wholes(tensors: Iterable[tuple[Tensor, torch.dtype]]) -> Iterator[Tensor]:
    """Each tensor as `whole(tensor.to(dtype))` gives it, in order. Collective.

    Neighbours whose rows are distributed evenly over one and the same axis are gathered together,
    up to `GATHER_BYTES` of them. A group is gathered when its first tensor is requested; each whole
    tensor is made when it is requested, and exists as long as the caller refers to it.
    """
    known: _Axes = {}
    kinds = groupby(tensors, lambda item: (_axis(item[0], known), item[1]))
    for (axis, dtype), neighbours in kinds:
        if axis is None:
            for tensor, _ in neighbours:
                yield whole(tensor.to(dtype))
            continue
        for group in _in_groups((tensor for tensor, _ in neighbours), dtype):
            yield from _together(group, axis, dtype)


def _axis(tensor: Tensor, known: _Axes) -> dist.ProcessGroup | None:
    """The processes among which a tensor's rows are distributed evenly; None where they are not."""
    if not isinstance(tensor, DTensor):
        return None
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    if (mesh, placements) not in known:  # a mesh takes 10 us to say it, for hundreds of tensors
        known[mesh, placements] = _axis_of_rows(mesh, placements)
    axis = known[mesh, placements]
    return axis if axis is not None and tensor.shape[0] % axis.size() == 0 else None


def _axis_of_rows(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> dist.ProcessGroup | None:
    split = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    if len(split) != 1 or not placements[split[0]].is_shard(0) or mesh.size(split[0]) == 1:
        return None
    return mesh.get_group(split[0])


def _in_groups(tensors: Iterable[Tensor], dtype: torch.dtype) -> Iterator[list[DTensor]]:
    group: list[DTensor] = []
    total = 0
    for tensor in tensors:
        assert isinstance(tensor, DTensor)
        num_bytes = tensor.numel() * dtype.itemsize
        if group and total + num_bytes > GATHER_BYTES:
            yield group
            group, total = [], 0
        group.append(tensor)
        total += num_bytes
    if group:
        yield group


def _together(
    group: list[DTensor], axis: dist.ProcessGroup, dtype: torch.dtype
) -> Iterator[Tensor]:
    """The whole tensors of a group, as `dtype`."""
    parts = [tensor.to_local() for tensor in group]
    ends = [0, *accumulate(part.numel() for part in parts)]
    own = torch.empty(ends[-1], dtype=dtype, device=group[0].device_mesh.device_type)
    for part, (start, end) in zip(parts, pairwise(ends), strict=True):
        own[start:end].view(part.shape).copy_(part)
    gathered = gather_rows(own[None], axis)
    del own, parts
    for tensor, (start, end) in zip(group, pairwise(ends), strict=True):
        # For a tensor that was gathered alone this is the buffer itself.
        yield gathered[:, start:end].reshape(tensor.shape)
