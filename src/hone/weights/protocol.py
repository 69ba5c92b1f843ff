"""The messages between the sender of weights and the engines that receive them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist

from hone.distributed.pool import Pending
from hone.weights.buckets import Bucket, Entry, plan_buckets
from hone.weights.link import SyncStore

__all__ = [
    "BUFFERS",
    "RECEIVED",
    "SENT",
    "ReceiveSpec",
    "Received",
    "Receivers",
    "sync_store_of",
]

BUFFERS = 2
"""Buckets that exist at a time."""
SENT, RECEIVED = "sent a manifest", "received all weights"
"""Phases of a delivery, which its members post to the `SyncStore`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveSpec:
    """What an engine must know to take one delivery. Pickles."""

    version: int
    delivery: int
    """Counts the sender's attempts."""
    host: str
    port: int
    """Of the sender's store."""
    names: tuple[str, ...]
    """Members of the link by rank, for messages; the sender is first."""
    entries: tuple[Entry, ...]
    """What engines must sample with, in the order in which it comes."""
    bucket_bytes: int
    timeout_s: float
    """For the whole delivery, from when a rank begins with it."""

    def buckets(self) -> list[Bucket]:
        """What comes, in this order."""
        return plan_buckets(self.entries, self.bucket_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What one rank has taken."""

    version: int
    bytes: int
    """Written into the engine's tensors."""
    seconds: float


class Receivers(Protocol):
    """The engines, as the sender reaches them."""

    @property
    def engine_ranks(self) -> Mapping[str, int]:
        """How many ranks each live engine has, by its name, in a fixed order."""
        ...

    def begin_sync(self) -> None:
        """Let nothing be sampled until `finish_sync`. Legal again after a delivery that failed."""
        ...

    def start_receive(self, spec: ReceiveSpec) -> Sequence[Pending]:
        """Let every rank of every engine call `WeightReceiver.receive`, in the order of
        `engine_ranks`. Returns the answer of each engine, which comes when all its ranks have."""
        ...

    def finish_sync(self, version: int) -> None:
        """Engines hold `version` and may sample."""
        ...


def sync_store_of(
    store: dist.Store,
    spec: ReceiveSpec,
    *,
    rank: int,
    watch: Callable[[], None] | None = None,
) -> SyncStore:
    """The shared store of one delivery, for the member with `rank` in the link."""
    return SyncStore(
        store,
        spec.delivery,
        names=spec.names,
        rank=rank,
        timeout_s=spec.timeout_s,
        watch=watch,
    )
