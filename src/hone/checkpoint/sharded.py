"""Sharded tensors: the part that each process holds, and reading that part of a saved tensor.

Each process writes its parts with their offsets in the whole tensor. A reader asks for a region and
gets it from whichever files contain it. So a checkpoint does not depend on how it was sharded:
data, tensor and pipeline sizes may all differ between the run that wrote it and the run that
resumes from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hone.checkpoint.atomic import CheckpointError

__all__ = [
    "Region",
    "StoredPart",
    "StoredTensor",
    "bytes_on",
    "laid_out",
    "local_part",
    "own_part",
    "region_of",
]


@dataclass(frozen=True, slots=True)
class Region:
    """A box inside a tensor."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.shape, strict=True))

    def meet(self, other: Region) -> Region | None:
        """The intersection of two regions; None where it is empty."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.shape, other.offsets, other.shape, strict=True)
        )
        shape = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
        return Region(offsets, shape) if all(n > 0 for n in shape) else None

    def within(self, outer: Region) -> tuple[slice, ...]:
        """The slices of this region in a tensor that has only the region `outer`."""
        offsets = tuple(o - base for o, base in zip(self.offsets, outer.offsets, strict=True))
        return Region(offsets, self.shape).slices


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of a tensor: all of it, unless it is a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bytes_on(device: torch.device, tensors: Iterable[Tensor]) -> int:
    """Bytes of this process's parts of tensors on a device; shared memory counts once."""
    storages = [local_part(t.detach()).untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.device == device}.values())


def region_of(tensor: Tensor) -> Region:
    """The region of a tensor that this process holds: all of it, unless it is a DTensor.

    Raises ValueError for a DTensor whose parts are still to be summed.
    """
    if not isinstance(tensor, DTensor):
        return Region((0,) * tensor.ndim, tuple(tensor.shape))
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError(f"a tensor of placements {tensor.placements} is no state: sum it first")
    shape, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return Region(tuple(offsets), tuple(shape))


def laid_out(local: Tensor, *, like: Tensor) -> Tensor:
    """A tensor with the shape and placements of `like` whose part on this process is `local`, of
    any dtype. Nothing is copied; where `like` is not a DTensor, the result is `local` itself.

    `DTensor.from_local` would move `local` to the mesh's devices. Here it stays on the host, where
    FSDP keeps offloaded parameters.
    """
    if not isinstance(like, DTensor):
        return local
    shape = region_of(like).shape
    if tuple(local.shape) != shape:
        raise ValueError(f"this process's part has shape {shape}, not {tuple(local.shape)}")
    twin = cast(DTensor, torch.empty_like(like.detach(), dtype=local.dtype, device="meta"))
    return DTensor(local, twin._spec, requires_grad=False)  # pyright: ignore[reportPrivateUsage]


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A region of a tensor, stored row-major in a file from byte `start` on."""

    file: Path
    start: int
    region: Region

    def mapped(self, dtype: torch.dtype) -> Tensor:
        """The values, mapped from the file and read on first use. Writing to them does not change
        the file."""
        size = prod(self.region.shape) * dtype.itemsize
        content = np.memmap(self.file, np.uint8, mode="c", offset=self.start, shape=(size,))
        return torch.from_numpy(content).view(dtype).view(self.region.shape)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a checkpoint, whose regions are read on demand."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    parts: tuple[StoredPart, ...]

    def full(self) -> Tensor:
        """The whole tensor, on the CPU."""
        return self.read(Region((0,) * len(self.shape), tuple(self.shape)))

    def read(self, region: Region) -> Tensor:
        """One region, on the CPU. A region inside of one part is mapped from its file, not copied.

        Raises CheckpointError where the parts do not cover it.
        """
        overlaps = [(part, both) for part in self.parts if (both := part.region.meet(region))]
        num_read = sum(prod(both.shape) for _, both in overlaps)
        if num_read != prod(region.shape):
            raise CheckpointError(
                f"{self.name} has {num_read} of {prod(region.shape)} values at {region.offsets} in "
                "the checkpoint: some process's part is missing, or two overlap"
            )
        if len(overlaps) == 1:
            ((part, both),) = overlaps
            return part.mapped(self.dtype)[both.within(part.region)]
        result = torch.empty(region.shape, dtype=self.dtype)
        for part, both in overlaps:
            result[both.within(region)] = part.mapped(self.dtype)[both.within(part.region)]
        return result


def own_part(value: Tensor | StoredTensor, *, like: Tensor) -> Tensor:
    """The region of a saved tensor that corresponds to this process's part of `like`, in the saved
    dtype. Only that region of a stored tensor is read; of a DTensor it is the local part.

    Raises ValueError for another shape, and for a DTensor with other placements.
    """
    if tuple(value.shape) != tuple(like.shape):
        raise ValueError(f"shape {tuple(value.shape)} was saved, {tuple(like.shape)} is wanted")
    region = region_of(like)
    if isinstance(value, StoredTensor):
        return value.read(region)
    if not isinstance(value, DTensor):
        return value[region.slices]
    if region_of(value) != region:
        raise ValueError(f"{value.placements} was saved, other parts are wanted: save it whole")
    return value.to_local()
