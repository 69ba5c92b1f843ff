"""Memory of a training step by kind, measured from torch's own record of allocations.

One step runs under torch's profiler, which notes every allocation and release with its address, on
a GPU and on a CPU. They are played back: at any moment it is known which blocks exist, and so at
the peak. A block's kind follows from what it is:

    weights, masters, optimizer     tensors that exist before the step; weights gathered in a pass
    gradients                       what the masters' gradients lie in when the passes are done
    activations                     allocated in a forward, and still there when it has ended
    other                           all else: logits, what a layer computes with, recomputed layers
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from hone.checkpoint.sharded import local_part

__all__ = [
    "KINDS",
    "Event",
    "Kind",
    "Marks",
    "MemoryProbe",
    "MemoryUse",
    "Storages",
    "existing_tensors",
    "play",
]

Kind = Literal["weights", "masters", "gradients", "optimizer", "activations", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_FORWARD, _PASSES = "hone bench: forward", "hone bench: forward and backward"


@dataclass(frozen=True, slots=True)
class Event:
    """An allocation (`num_bytes` above 0) or release, at a time in nanoseconds."""

    time: int
    address: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Marks:
    """Times and addresses of a step that are known in addition to its allocations."""

    gradients: set[int]
    """Addresses of the gradients at `passes_end`. A block at one of them that was released before
    was something else."""
    forwards: list[tuple[int, int]]
    """Begin and end of the forward of each micro-batch, in order."""
    passes_end: int

    def phase(self, time: int) -> Literal["forward", "backward", "optimizer"]:
        if time > self.passes_end:
            return "optimizer"
        inside = any(start <= time <= end for start, end in self.forwards)
        return "forward" if inside else "backward"

    def outlives_forward(self, start: int, end: float) -> bool:
        """Whether a block allocated in the forward of a micro-batch outlives it."""
        place = bisect_right(self.forwards, start, key=lambda span: span[0]) - 1
        return place >= 0 and start <= self.forwards[place][1] < end


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of one device over one step."""

    peak: int
    phase: Literal["forward", "backward", "optimizer"]
    """Phase of the peak."""
    at_peak: dict[Kind, int]
    largest: dict[Kind, int]
    """Peak of each kind; the peaks may be at different times."""
    host: int
    """Bytes offloaded to the host, except activations, if training is on another device."""


@dataclass(slots=True)
class Storages:
    """Known storages by address, with kind and size."""

    kinds: dict[int, Kind] = field(default_factory=dict[int, Kind])
    num_bytes: dict[int, int] = field(default_factory=dict[int, int])
    on_host: dict[int, int] = field(default_factory=dict[int, int])
    """Offloaded bytes by address."""

    def add(self, kind: Kind, tensors: Iterable[Tensor], device: torch.device) -> None:
        """Add the storages of local tensors. A known storage keeps its kind."""
        for tensor in map(local_part, tensors):
            storage = tensor.untyped_storage()
            if tensor.device.type != device.type:
                self.on_host[tensor.data_ptr()] = tensor.nbytes  # several tensors share one buffer
            elif storage.nbytes() and storage.data_ptr() not in self.num_bytes:
                self.kinds[storage.data_ptr()] = kind
                self.num_bytes[storage.data_ptr()] = storage.nbytes()

    def kind(self, address: int) -> Kind:
        return self.kinds[address] if address in self.num_bytes else "other"

    def total(self, kind: Kind) -> int:
        return sum(n for address, n in self.num_bytes.items() if self.kinds[address] == kind)


def existing_tensors(
    *,
    weights: Iterable[Tensor],
    masters: Iterable[Tensor],
    moments: Iterable[Tensor],
    dtype: torch.dtype,
    device: torch.device,
    host_bytes: int = 0,
) -> Storages:
    """The storages that exist between two steps. Masters in the compute format `dtype` are the
    weights themselves. `host_bytes` are those of gradients on the host."""
    storages = Storages()
    storages.add("masters", (master for master in masters if master.dtype != dtype), device)
    storages.add("weights", weights, device)
    storages.add("optimizer", moments, device)
    if device.type != "cpu" and host_bytes:
        storages.on_host[0] = host_bytes
    return storages


class MemoryProbe:
    """Measures the memory of one step. Inactive until `measure`; marks cost nothing then."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_active = False
        self._gathered: set[int] = set()
        self._gradients: set[int] = set()

    @contextmanager
    def forward(self, weights: Callable[[], Iterable[Tensor]]) -> Generator[None]:
        """Context manager around the forward of a micro-batch. `weights` returns the module's
        weights when it has ended; with several processes they may have been gathered."""
        if not self._is_active:
            yield
            return
        with record_function(_FORWARD):
            yield
        self._gathered.update(_addresses(weights()))

    @contextmanager
    def passes(self, gradients: Callable[[], Iterable[Tensor]]) -> Generator[None]:
        """Context manager around all passes of the step. `gradients` returns the resulting
        gradients."""
        if not self._is_active:
            yield
            return
        with record_function(_PASSES):
            yield
        self._gradients.update(_addresses(gradients()))

    def measure(self, step: Callable[[], object], storages: Storages) -> MemoryUse:
        """Run `step` and measure it. It must leave as much memory in use as it finds."""
        self._gathered, self._gradients = set(), set()
        base = sum(storages.num_bytes.values())
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            base = torch.cuda.memory_allocated(self._device)
        self._is_active = True
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            step()
        self._is_active = False
        results: Any = record.profiler and record.profiler.kineto_results
        events: list[Event] = []
        spans: dict[str, list[tuple[int, int]]] = {_FORWARD: [], _PASSES: []}
        for node in _walk(results.experimental_event_tree()):
            kind, fields = node.typed
            if kind.name == "Allocation":
                if fields.device.type == self._device.type and fields.ptr:
                    events.append(Event(node.start_time_ns, fields.ptr, fields.alloc_size))
            elif node.name in spans:
                spans[node.name].append((node.start_time_ns, node.end_time_ns))
        gathered = dict.fromkeys(self._gathered - storages.num_bytes.keys(), "weights")
        return play(
            sorted(events, key=lambda event: event.time),
            storages=replace(storages, kinds={**storages.kinds, **gathered}),
            base=base,
            marks=Marks(
                gradients=self._gradients,
                forwards=sorted(spans[_FORWARD]),
                passes_end=max((end for _, end in spans[_PASSES]), default=0),
            ),
        )


def play(events: list[Event], *, storages: Storages, base: int, marks: Marks) -> MemoryUse:
    """Replay a record of allocations, in order.

    `base` bytes exist before the first event, those of `storages` and others. `storages.kinds` also
    has the addresses of weights that are gathered during the step.
    """
    now: dict[Kind, int] = {kind: storages.total(kind) for kind in KINDS}
    now["other"] += base - sum(now.values())
    peak, peak_time, at_peak, largest = base, 0, dict(now), dict(now)
    for time, kind, num_bytes in _changes(events, storages, marks):
        if kind == "other" and now[kind] + num_bytes < 0:
            continue  # a release of an uncounted block
        now[kind] += num_bytes
        largest[kind] = max(largest[kind], now[kind])
        if (total := sum(now.values())) > peak:
            peak, peak_time, at_peak = total, time, dict(now)
    return MemoryUse(
        peak=peak,
        phase=marks.phase(peak_time),
        at_peak=at_peak,
        largest=largest,
        host=sum(storages.on_host.values()),
    )


def _changes(
    events: list[Event], storages: Storages, marks: Marks
) -> Iterable[tuple[int, Kind, int]]:
    """Time, kind and bytes of every change, in order.

    A new block at the address of another one ends that one: the profiler does not see what threads
    of gloo and NCCL release.
    """
    changes: list[tuple[int, Kind, int]] = []
    # By address: position in `changes`, and its allocation.
    taken: dict[int, tuple[int, Event]] = {}

    def give_back(address: int, time: float) -> Kind:
        place, event = taken.pop(address)
        kind = _kind(event, time, storages, marks)
        changes[place] = (event.time, kind, event.num_bytes)
        return kind

    for event in events:
        address, is_known = event.address, event.address in taken
        if event.num_bytes < 0:
            kind = give_back(address, event.time) if is_known else storages.kind(address)
            changes.append((event.time, kind, event.num_bytes))
            continue
        if is_known:
            num_bytes = taken[address][1].num_bytes
            changes.append((event.time, give_back(address, event.time), -num_bytes))
        taken[address] = len(changes), event
        # Its kind is only known at its release.
        changes.append((event.time, "other", event.num_bytes))
    for address in [*taken]:
        give_back(address, math.inf)
    return changes


def _kind(event: Event, end: float, storages: Storages, marks: Marks) -> Kind:
    """The kind of a block that is allocated at `event` and released at `end`."""
    if event.address in marks.gradients and event.time < marks.passes_end <= end:
        return "gradients"
    if marks.outlives_forward(event.time, end):
        is_gathered = storages.kinds.get(event.address) == "weights"
        return "weights" if is_gathered else "activations"
    return "other"


def _addresses(tensors: Iterable[Tensor]) -> set[int]:
    storages = [local_part(tensor.detach()).untyped_storage() for tensor in tensors]
    return {storage.data_ptr() for storage in storages if storage.nbytes()}


def _walk(nodes: Iterable[Any]) -> Iterator[Any]:
    """Iterate over all events of the tree. Without recursion: the tree is as deep as the call
    stack."""
    stack = list(nodes)
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children)
