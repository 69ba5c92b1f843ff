"""Tensors of which each process holds a part: which part, and the same part of a saved tensor.

Each process writes the parts that it holds, with their place in the whole tensor. A reader asks for
a region and gets it from whatever files it lies in, so a checkpoint does not remember how it was
sharded: data, tensor and pipeline sizes may all differ between the run that wrote it and the run
that resumes from it.
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
    "Piece",
    "Region",
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
        """What both cover; None where that is nothing."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.shape, other.offsets, other.shape, strict=True)
        )
        shape = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
        return Region(offsets, shape) if all(n > 0 for n in shape) else None

    def within(self, outer: Region) -> tuple[slice, ...]:
        """This region's place in a tensor that holds just `outer`."""
        offsets = tuple(o - base for o, base in zip(self.offsets, outer.offsets, strict=True))
        return Region(offsets, self.shape).slices


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: all of it, unless it is a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bytes_on(device: torch.device, tensors: Iterable[Tensor]) -> int:
    """What this process holds of tensors on a device; memory that several share counts once."""
    storages = [local_part(t.detach()).untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.device == device}.values())


def region_of(tensor: Tensor) -> Region:
    """The part of a tensor that this process holds: all of it, unless it is a DTensor.

    Raises ValueError for one whose parts are still to be summed.
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
    """`local`, of any dtype, as this process's part of a tensor with the shape and placements of
    `like`. Nothing is copied: where `like` is no DTensor, `local` itself.

    `DTensor.from_local` moves a part to the mesh's devices. This leaves one that lies on the host
    there, as FSDP does with parameters that it offloads.
    """
    if not isinstance(like, DTensor):
        return local
    shape = region_of(like).shape
    if tuple(local.shape) != shape:
        raise ValueError(f"this process's part has shape {shape}, not {tuple(local.shape)}")
    twin = cast(DTensor, torch.empty_like(like.detach(), dtype=local.dtype, device="meta"))
    return DTensor(local, twin._spec, requires_grad=False)  # pyright: ignore[reportPrivateUsage]


@dataclass(frozen=True, slots=True)
class Piece:
    """A region of a tensor, row-major in a file from byte `start`."""

    file: Path
    start: int
    region: Region

    def mapped(self, dtype: torch.dtype) -> Tensor:
        """The values, read when they are used. Writing to them does not change the file."""
        size = prod(self.region.shape) * dtype.itemsize
        content = np.memmap(self.file, np.uint8, mode="c", offset=self.start, shape=(size,))
        return torch.from_numpy(content).view(dtype).view(self.region.shape)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a checkpoint, read when and as far as it is needed."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    def full(self) -> Tensor:
        """All of it, on the CPU."""
        return self.read(Region((0,) * len(self.shape), tuple(self.shape)))

    def read(self, region: Region) -> Tensor:
        """One region, on the CPU: mapped from its file where it lies in one, without a copy.

        Raises CheckpointError where pieces do not cover it.
        """
        found = [(piece, part) for piece in self.pieces if (part := piece.region.meet(region))]
        num_read = sum(prod(part.shape) for _, part in found)
        if num_read != prod(region.shape):
            raise CheckpointError(
                f"{self.name} has {num_read} of {prod(region.shape)} values at {region.offsets} in "
                "the checkpoint: some process's part is missing, or two overlap"
            )
        if len(found) == 1:
            ((piece, part),) = found
            return piece.mapped(self.dtype)[part.within(piece.region)]
        result = torch.empty(region.shape, dtype=self.dtype)
        for piece, part in found:
            values = piece.mapped(self.dtype)[part.within(piece.region)]
            result[part.within(region)] = values
        return result


def own_part(value: Tensor | StoredTensor, *, like: Tensor) -> Tensor:
    """What this process needs of a saved tensor for its part of `like`, in the saved dtype: of a
    stored one only that is read, of a DTensor it is what this process has.

    Raises ValueError for another shape, or a DTensor of which this process has another part.
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
