"""The messages between the sender of weights and the engines that receive them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from hone.distributed.pool import Pending
from hone.types import TensorRecord, WeightManifest
from hone.weights.buckets import Bucket, Entry, plan_buckets

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
    key: bytes = field(repr=False)
    """Secret of the run, with which members sign what they post in the sender's store. It reaches
    them with this object, over a line that has a key of its own."""

    def buckets(self) -> list[Bucket]:
        """What comes, in this order."""
        return plan_buckets(self.entries, self.bucket_bytes)


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
        """Let every rank of every engine call `WeightReceiver.receive`. Returns the answer of each
        engine, in the order of `engine_ranks`."""
        ...

    def finish_sync(self, version: int) -> None:
        """Engines hold `version` and may sample."""
        ...


def manifest_to_json(manifest: WeightManifest) -> dict[str, Any]:
    """The manifest as JSON can hold it."""
    tensors = {name: asdict(record) for name, record in manifest.tensors.items()}
    return {"version": manifest.version, "tensors": tensors}


def manifest_from_json(value: Mapping[str, Any]) -> WeightManifest:
    """The manifest that `manifest_to_json` has written."""
    tensors = {
        name: TensorRecord(tuple(r["shape"]), r["dtype"], r["checksum"], r["tied_to"])
        for name, r in value["tensors"].items()
    }
    return WeightManifest(value["version"], tensors)
