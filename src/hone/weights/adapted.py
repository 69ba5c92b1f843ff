"""Engines that merge adapters themselves: what they keep, and what is said of it.

The frozen base travels once. From then on A and B of each adapted projection do, and an engine
makes `W + (alpha / rank) B A` of them as the trainer would (`hone.models.adapters.Projection`). A
merged weight cannot be taken apart again, so W is kept beside it: in host memory, which leaves the
device to the KV cache, each rank its parts. What nobody adapts lies in the engine alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

import psutil
import torch
from torch import Tensor

from hone.models.adapters import ADAPTER, Collector, Projection
from hone.types import TensorRecord
from hone.weights.buckets import Entry, plan_buckets

__all__ = [
    "AdapterSpec",
    "Cut",
    "Holding",
    "KeptBase",
    "MergeDiffersError",
    "Way",
    "arithmetic_of",
    "choose_way",
    "described",
    "lacks_room",
]

CHUNK_BYTES = 1 << 30
"""Of host memory. Page-locked memory comes in powers of two."""
SHARES = 8
"""Buckets of adapters, at least: the first are merged while the sender walks to the last."""

Shard = Callable[[str, Tensor], Tensor]
"""`Engine.shard`: the part of a whole weight that a rank holds."""


class MergeDiffersError(RuntimeError):
    """A rank has merged, or kept, something else than the trainer has. Sent once more, it gets the
    base anew; where that does not help, merged weights."""


class Way(Enum):
    """What a delivery to engines of an adapted model consists of."""

    ADAPTERS = auto()
    """What is trained: all engines hold the base."""
    BASE = auto()
    """All that is stored: an engine is new, or has dropped the base."""
    MERGED = auto()
    """Merged weights: some rank cannot merge, or would not to the trainer's bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """What an engine must know to merge adapters itself. Pickles."""

    base: str
    """Names the frozen weights of this sender."""
    entries: tuple[Entry, ...]
    """All that the trainer stores, in the order in which it comes."""
    trained: frozenset[str]
    projections: Mapping[str, Projection]

    @property
    def merged_names(self) -> frozenset[str]:
        """Of the weights that are merged."""
        return frozenset(f"{path}.weight" for path in self.projections)

    def travelling(self, way: Way) -> list[Entry]:
        """What comes of the stored tensors."""
        if way is Way.BASE:
            return list(self.entries)
        return [entry for entry in self.entries if not self.trained.isdisjoint(entry.names)]

    def staying(self, way: Way) -> frozenset[str]:
        """Names of all others."""
        come = {name for entry in self.travelling(way) for name in entry.names}
        return frozenset(n for entry in self.entries for n in entry.names if n not in come)

    def bucket_bytes(self, way: Way, limit: int) -> int:
        if way is Way.BASE:
            return limit
        num_bytes = sum(entry.num_bytes for entry in self.travelling(way))
        return min(limit, -(-num_bytes // SHARES))


@dataclass(frozen=True, slots=True)
class Cut:
    """Which part of a whole weight a rank holds."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, part: Tensor) -> Cut:
        """That of a view of a contiguous tensor."""
        return cls(tuple(part.shape), part.stride(), int(part.storage_offset()))

    def take(self, whole: Tensor) -> Tensor:
        return torch.as_strided(whole.contiguous(), self.shape, self.stride, self.offset)

    def name(self, weight: str) -> str:
        """Of the part, in a manifest."""
        return f"{weight} {self.shape} of {self.stride} at {self.offset}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a rank says of itself before a delivery. Pickles."""

    base: str | None
    """Which one it keeps."""
    arithmetic: str
    cuts: Mapping[str, Cut]
    """Of the weights that are merged."""
    objection: str | None = None
    """Why it cannot merge."""

    @classmethod
    def of(
        cls,
        kept: KeptBase | None,
        spec: AdapterSpec,
        shard: Shard,
        device: torch.device,
        objection: str | None = None,
    ) -> Holding:
        """That of a rank on `device` which keeps `kept`."""
        cuts = {
            f"{path}.weight": Cut.of(
                shard(f"{path}.weight", torch.empty(projection.shape, device="meta"))
            )
            for path, projection in spec.projections.items()
        }
        return cls(
            base=kept and kept.name,
            arithmetic=arithmetic_of(device),
            cuts=cuts,
            objection=objection,
        )


def arithmetic_of(device: torch.device) -> str:
    """What makes the bits of a product of matrices, for people too: where it is equal they are."""
    threads = torch.get_num_threads()  # who may cut a product along the sum
    name = f"{threads} threads of a CPU with {torch.backends.cpu.get_cpu_capability()}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    precision = torch.get_float32_matmul_precision()
    return f"{name}, torch {torch.__version__}, float32 products in {precision} precision"


def choose_way(spec: AdapterSpec, own: str, holdings: Iterable[Holding]) -> Way:
    """What must be sent to ranks of these holdings by a trainer whose arithmetic is `own`."""
    holdings = list(holdings)
    if any(holding.objection or holding.arithmetic != own for holding in holdings):
        return Way.MERGED
    is_held = all(holding.base == spec.base for holding in holdings)
    return Way.ADAPTERS if is_held else Way.BASE


def described(
    spec: AdapterSpec,
    stays: frozenset[str],
    holdings: Iterable[Holding],
    stored: Iterable[tuple[str, Tensor]],
) -> Iterator[tuple[str, Tensor]]:
    """What a sender's manifest is of: what travels; of each merged weight the parts that ranks must
    have made, by `Cut.name`; and what stays and is in no merged weight."""
    cuts: dict[str, set[Cut]] = {name: set() for name in spec.merged_names}
    for holding in holdings:
        for name, cut in holding.cuts.items():
            cuts[name].add(cut)
    collector = Collector({path: p.base | ADAPTER for path, p in spec.projections.items()})
    for name, tensor in stored:
        if name not in stays or name not in collector:
            yield name, tensor
        if name not in collector or (complete := collector.add(name, tensor)) is None:
            continue
        path, parts = complete
        merged = spec.projections[path].merge(parts)
        for cut in cuts[f"{path}.weight"]:
            yield cut.name(f"{path}.weight"), cut.take(merged)
    collector.require_complete()


def fits(layout: Sequence[Entry], memory: Mapping[str, Tensor]) -> bool:
    """Whether `memory` has the tensors of `layout`."""
    there = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in memory.items()}
    return there == {entry.names[0]: (entry.shape, entry.dtype) for entry in layout}


def lacks_room(layout: Sequence[Entry], memory: Mapping[str, Tensor]) -> str | None:
    """Why there is no room for `layout` in host memory, as far as can be seen: ranks of a host look
    at the same time."""
    num_bytes, free = sum(entry.num_bytes for entry in layout), psutil.virtual_memory().available
    if fits(layout, memory) or num_bytes <= free:
        return None
    return (
        f"the frozen weights of adapted projections, which a rank keeps in host memory, take "
        f"{num_bytes / 2**30:.1f} GiB of {free / 2**30:.1f} GiB that are free"
    )


@dataclass(slots=True)
class KeptBase:
    """The frozen weights of adapted projections that a rank keeps in host memory: of whole formats
    its parts, of four bits, which cannot be cut everywhere, all."""

    name: str
    tensors: dict[str, Tensor]
    arrived: Mapping[str, TensorRecord] = field(default_factory=dict[str, TensorRecord])
    """What came with the base, whole."""
    records: Mapping[str, TensorRecord] = field(default_factory=dict[str, TensorRecord])
    """What the engine was proven to sample with, by the last delivery."""

    @classmethod
    def layout(cls, spec: AdapterSpec, shard: Shard) -> list[Entry]:
        """What a rank keeps of the base of `spec`."""
        names = {
            f"{path}.{leaf}": f"{path}.weight"
            for path, projection in spec.projections.items()
            for leaf in projection.base
        }
        entries: list[Entry] = []
        for entry in spec.entries:
            (name, *_) = entry.names
            if name not in names:
                continue
            shape = entry.shape
            if name == names[name]:
                shape = tuple(shard(name, torch.empty(shape, device="meta")).shape)
            entries.append(Entry((name,), shape, entry.dtype))
        return entries

    @classmethod
    def allocate(
        cls, name: str, layout: Sequence[Entry], memory: Mapping[str, Tensor], device: torch.device
    ) -> KeptBase:
        """Room for the base called `name`: `memory` of a former one where it fits, page-locked
        where `device` is a GPU."""
        if fits(layout, memory):
            return cls(name, dict(memory))
        tensors: dict[str, Tensor] = {}
        for bucket in plan_buckets(layout, CHUNK_BYTES):
            is_pinned = device.type == "cuda"
            chunk = torch.empty(bucket.num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
            tensors |= bucket.named_views(chunk)
        return cls(name, tensors)

    def merged(
        self,
        spec: AdapterSpec,
        way: Way,
        shard: Shard,
        arriving: Iterable[tuple[str, Tensor]],
    ) -> Iterator[tuple[str, Tensor]]:
        """A rank's parts of merged weights, and of others that arrive, under the usual names.

        Of what arrives the base is kept. Raises RuntimeError where parts of an adapter are missing.
        """
        comes = {
            path: ADAPTER | (projection.base if way is Way.BASE else frozenset[str]())
            for path, projection in spec.projections.items()
        }
        collector = Collector(comes)
        for name, tensor in arriving:
            if name not in collector:
                yield name, shard(name, tensor)
                continue
            device, kept = tensor.device, self.tensors.get(name)
            if kept is not None:
                own = shard(name, tensor) if name in spec.merged_names else tensor
                tensor = kept.copy_(own, non_blocking=True)  # what has arrived is let go
            if (complete := collector.add(name, tensor)) is None:
                continue
            path, parts = complete
            weight, projection = f"{path}.weight", spec.projections[path]
            for leaf in projection.base:
                parts[leaf] = self.tensors[f"{path}.{leaf}"].to(device, non_blocking=True)
            yield weight, projection.merge(parts, partial(shard, weight))
        collector.require_complete()
