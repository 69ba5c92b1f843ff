"""Tensors of many processes in one checkpoint, readable by any number of them.

Each process writes the parts of the tensors that it holds; which parts make up a tensor is kept in
an index. A reader asks for a region of the tensor and gets it from whatever files it lies in, so a
checkpoint does not remember how it was sharded: data, tensor and pipeline sizes may all differ
between the run that wrote it and the run that goes on from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hone.checkpoint.atomic import CheckpointError

__all__ = [
    "Part",
    "Piece",
    "Region",
    "StoredTensor",
    "laid_out",
    "local_part",
    "part_of",
    "region_of",
    "take",
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
        return tuple(
            slice(o - base, o - base + n)
            for o, base, n in zip(self.offsets, outer.offsets, self.shape, strict=True)
        )


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: all of it, unless it is a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
class Part:
    """What one process has of a tensor."""

    local: Tensor
    region: Region | None
    """What it has to write; None where others write all of it."""
    shape: tuple[int, ...]
    """Of the whole tensor."""

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor."""
        return prod(self.shape) * self.local.element_size()


def part_of(tensor: Tensor, *, is_first: bool, copy: bool) -> Part:
    """What this process holds, and has to write, of a tensor.

    Of equal copies the first holder's is written. `is_first` says whether this is the first of all
    processes, which writes what is no DTensor. With `copy` what is to be written is a copy in host
    memory, which training does not change.
    """
    local = tensor.detach()
    region = region_of(tensor) if is_first else None
    if isinstance(tensor, DTensor):
        local = tensor.to_local().detach()
        place = tensor.device_mesh.get_coordinate()
        is_copy = place is None or any(
            isinstance(placement, Replicate) and coordinate
            for placement, coordinate in zip(tensor.placements, place, strict=True)
        )
        region = None if is_copy or not local.numel() else region_of(tensor)
    if copy and region is not None:
        local = local.to("cpu", copy=True)
    return Part(local, region, tuple(tensor.shape))


@dataclass(frozen=True, slots=True)
class Piece:
    """A region of a tensor, under `key` in a safetensors file."""

    file: Path
    key: str
    region: Region


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
        """One region, on the CPU. Raises CheckpointError where pieces do not cover it."""
        result = torch.empty(region.shape, dtype=self.dtype)
        num_read = 0
        for piece in self.pieces:
            part = piece.region.meet(region)
            if part is None:
                continue
            with safe_open(piece.file, framework="pt") as file:
                stored: Any = file.get_slice(piece.key) if region.shape else None
                if stored is None:
                    result.copy_(file.get_tensor(piece.key))
                else:
                    result[part.within(region)] = stored[part.within(piece.region)]
            num_read += prod(part.shape)
        if num_read != result.numel():
            raise CheckpointError(
                f"{self.name} has {num_read} of {result.numel()} values at {region.offsets} in the "
                "checkpoint: some process's part is missing, or two overlap"
            )
        return result


def take(value: Tensor | StoredTensor, *, like: Tensor) -> Tensor:
    """A saved tensor laid out as `like` is: of a DTensor this process's part alone is read.

    The result lies in host memory, so that a device that is full with what it will be copied into
    can take it over. It has the saved dtype and shares no memory with `value`. Raises ValueError
    for another shape.
    """
    if tuple(value.shape) != tuple(like.shape):
        raise ValueError(f"shape {tuple(value.shape)} was saved, {tuple(like.shape)} is wanted")
    region = region_of(like)
    if isinstance(value, StoredTensor):
        return laid_out(value.read(region), like=like)
    return laid_out(value[region.slices].to("cpu", copy=True), like=like)
