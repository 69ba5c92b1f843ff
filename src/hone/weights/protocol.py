"""The messages between the sender of weights and the engines that receive them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from hone.distributed.pool import Pending
from hone.types import TensorRecord, WeightManifest
from hone.weights.buckets import WeightBucket, WeightEntry, plan_buckets

__all__ = [
    "BUFFERS",
    "RECEIVED",
    "SENT",
    "ReceiveSpec",
    "Receivers",
    "manifest_from_json",
    "manifest_to_json",
]

BUFFERS = 2
"""Buckets in memory at a time: one in flight, one being filled or unpacked."""
SENT, RECEIVED = "sent a manifest", "received all weights"
"""Phases of a delivery, which its members post to the `SyncStore`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveSpec:
    """The parameters of one delivery, for an engine. Can be pickled."""

    version: int
    delivery: int
    """Number of the sender's attempt."""
    host: str
    port: int
    """Port of the sender's store."""
    names: tuple[str, ...]
    """Members of the link by rank, for messages; the sender is first."""
    entries: tuple[WeightEntry, ...]
    """The weights that engines must hold, in the order in which they are sent."""
    bucket_bytes: int
    timeout_s: float
    """Limit for the whole delivery, from when a rank starts with it."""
    key: bytes = field(repr=False)
    """Secret of the run, with which members sign what they post in the sender's store. It is sent
    with this object, over a connection that has its own key."""

    def buckets(self) -> list[WeightBucket]:
        """The buckets, in the order in which they are sent."""
        return plan_buckets(self.entries, self.bucket_bytes)


class Receivers(Protocol):
    """The sender's interface to the engines."""

    @property
    def engine_ranks(self) -> Mapping[str, int]:
        """How many ranks each live engine has, by its name, in a fixed order."""
        ...

    def begin_sync(self) -> None:
        """Stop sampling until `finish_sync`. May be called again after a failed delivery."""
        ...

    def start_receive(self, spec: ReceiveSpec) -> Sequence[Pending]:
        """Start `WeightReceiver.receive` on every rank of every engine. Returns the pending answer
        of each engine, in the order of `engine_ranks`."""
        ...

    def finish_sync(self, version: int) -> None:
        """Note that the engines hold `version`, and let them sample."""
        ...


def manifest_to_json(manifest: WeightManifest) -> dict[str, Any]:
    """The manifest as a JSON value."""
    tensors = {name: asdict(record) for name, record in manifest.tensors.items()}
    return {"version": manifest.version, "tensors": tensors}


def manifest_from_json(value: Mapping[str, Any]) -> WeightManifest:
    """Inverse of `manifest_to_json`."""
    tensors = {
        name: TensorRecord(tuple(r["shape"]), r["dtype"], r["checksum"], r["tied_to"])
        for name, r in value["tensors"].items()
    }
    return WeightManifest(value["version"], tensors)
