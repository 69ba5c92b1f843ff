"""Tensors to byte buffers of bounded size, and back.

Sender and receiver derive the same buckets from the same list of entries, so that only bytes
travel. A tensor that has several names travels once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hone.models.manifest import memory_of

__all__ = ["Bucket", "Entry", "layout_of", "plan_buckets"]

ALIGNMENT = 128
"""Of each tensor in its buffer, in bytes: views of any dtype, and whole lines of a cache."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor that travels, without its values."""

    names: tuple[str, ...]
    """All that it has; the first is the one that the others are tied to."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """Entries that travel in one buffer, each at a fixed place."""

    entries: tuple[Entry, ...]
    offsets: tuple[int, ...]
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
        """The same under each of their names."""
        for entry, view in zip(self.entries, self.views(buffer), strict=True):
            for name in entry.names:
                yield name, view


def layout_of(named: Iterable[tuple[str, Tensor]]) -> list[Entry]:
    """What `named` consists of, in its order. Names of one and the same memory are one entry."""
    entries: dict[str, Entry] = {}
    owners: dict[object, tuple[str, StorageWeakRef]] = {}
    for name, tensor in named:
        owner, storage = owners.get(memory_of(tensor), (name, None))
        if storage is None or storage.expired():  # the same address is not the same memory
            owner = name
            owners[memory_of(tensor)] = name, StorageWeakRef(tensor.untyped_storage())
        names = (*entries[owner].names, name) if owner in entries else (name,)
        entries[owner] = Entry(names, tuple(tensor.shape), tensor.dtype)
    return list(entries.values())


def plan_buckets(entries: Sequence[Entry], bucket_bytes: int) -> list[Bucket]:
    """Cut the list into buckets of at most `bucket_bytes`; a larger tensor travels alone."""
    buckets: list[Bucket] = []
    members: list[Entry] = []
    offsets: list[int] = []
    end = 0
    for entry in entries:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        if members and offset + entry.num_bytes > bucket_bytes:
            buckets.append(Bucket(tuple(members), tuple(offsets), end))
            members, offsets, offset = [], [], 0
        members.append(entry)
        offsets.append(offset)
        end = offset + entry.num_bytes
    if members:
        buckets.append(Bucket(tuple(members), tuple(offsets), end))
    return buckets
