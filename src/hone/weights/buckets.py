"""Packing of tensors into byte buffers of bounded size, and unpacking.

Sender and receiver derive the same buckets from the same list of entries, so only bytes are sent. A
tensor with several names is sent once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hone.models.manifest import memory_of

__all__ = ["WeightBucket", "WeightEntry", "layout_of", "plan_buckets"]

ALIGNMENT = 128
"""Alignment of each tensor in its buffer, in bytes: enough for a view of any dtype, and a multiple
of a cache line."""


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """Names, shape and dtype of one tensor that is sent."""

    names: tuple[str, ...]
    """All names of the tensor; the others are tied to the first."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Entries that are sent in one buffer, each at a fixed offset."""

    entries: tuple[WeightEntry, ...]
    offsets: tuple[int, ...]
    """Byte offset of each entry."""
    num_bytes: int

    def new_buffer(self, device: torch.device) -> Tensor:
        """Memory for the bucket, uint8 [num_bytes], uninitialised."""
        return torch.empty(self.num_bytes, dtype=torch.uint8, device=device)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors of the entries in `buffer`, in order, sharing its memory."""
        return [
            buffer[offset : offset + entry.num_bytes].view(entry.dtype).view(entry.shape)
            for entry, offset in zip(self.entries, self.offsets, strict=True)
        ]

    def named_views(self, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The views of `views`, each under all of its names."""
        for entry, view in zip(self.entries, self.views(buffer), strict=True):
            for name in entry.names:
                yield name, view


def layout_of(named: Iterable[tuple[str, Tensor]]) -> list[WeightEntry]:
    """The entries of `named`, in its order. Tensors that share memory are one entry."""
    entries: dict[str, WeightEntry] = {}
    owners: dict[object, tuple[str, StorageWeakRef]] = {}
    for name, tensor in named:
        owner, storage = owners.get(memory_of(tensor), (name, None))
        if storage is None or storage.expired():  # a freed address may have been reused
            owner = name
            owners[memory_of(tensor)] = name, StorageWeakRef(tensor.untyped_storage())
        names = (*entries[owner].names, name) if owner in entries else (name,)
        entries[owner] = WeightEntry(names, tuple(tensor.shape), tensor.dtype)
    return list(entries.values())


def plan_buckets(entries: Sequence[WeightEntry], bucket_bytes: int) -> list[WeightBucket]:
    """Split the list into buckets of at most `bucket_bytes`; a larger tensor has its own bucket."""
    buckets: list[WeightBucket] = []
    members: list[WeightEntry] = []
    offsets: list[int] = []
    end = 0
    for entry in entries:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        if members and offset + entry.num_bytes > bucket_bytes:
            buckets.append(WeightBucket(tuple(members), tuple(offsets), end))
            members, offsets, offset = [], [], 0
        members.append(entry)
        offsets.append(offset)
        end = offset + entry.num_bytes
    if members:
        buckets.append(WeightBucket(tuple(members), tuple(offsets), end))
    return buckets
