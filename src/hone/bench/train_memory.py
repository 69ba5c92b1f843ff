"""What the memory of a training step consists of, measured from torch's own record of allocations.

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
    "Held",
    "Kind",
    "Marks",
    "MemoryProbe",
    "MemoryUse",
    "held_tensors",
    "play",
]

Kind = Literal["weights", "masters", "gradients", "optimizer", "activations", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_FORWARD, _PASSES = "hone bench: forward", "hone bench: forward and backward"


@dataclass(frozen=True, slots=True)
class Event:
    """Memory that was taken (`num_bytes` above 0) or given back at a time in nanoseconds."""

    time: int
    address: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Marks:
    """What is known of a step besides its allocations."""

    gradients: set[int]
    """Addresses of the gradients at `passes_end`; a block given back before was something else."""
    forwards: list[tuple[int, int]]
    """When the forward of each micro-batch began and ended, in order."""
    passes_end: int

    def phase(self, time: int) -> Literal["forward", "backward", "optimizer"]:
        if time > self.passes_end:
            return "optimizer"
        inside = any(start <= time <= end for start, end in self.forwards)
        return "forward" if inside else "backward"

    def outlives_forward(self, start: int, end: float) -> bool:
        """Whether a block taken in the forward of a micro-batch is still there afterwards."""
        place = bisect_right(self.forwards, start, key=lambda span: span[0]) - 1
        return place >= 0 and start <= self.forwards[place][1] < end


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of one device over one step."""

    peak: int
    phase: Literal["forward", "backward", "optimizer"]
    """When the peak was."""
    at_peak: dict[Kind, int]
    largest: dict[Kind, int]
    """The most of each kind; not all at one time."""
    host: int
    """What is offloaded, but activations, where training has another device."""


@dataclass(slots=True)
class Held:
    """Storages by address: their kind and size."""

    kinds: dict[int, Kind] = field(default_factory=dict[int, Kind])
    num_bytes: dict[int, int] = field(default_factory=dict[int, int])
    on_host: dict[int, int] = field(default_factory=dict[int, int])
    """Bytes of what is offloaded, by address."""

    def add(self, kind: Kind, tensors: Iterable[Tensor], device: torch.device) -> None:
        """Take in the storages of local tensors; one that is known keeps its kind."""
        for tensor in map(local_part, tensors):
            storage = tensor.untyped_storage()
            if tensor.device.type != device.type:
                self.on_host[tensor.data_ptr()] = tensor.nbytes  # several share one buffer
            elif storage.nbytes() and storage.data_ptr() not in self.num_bytes:
                self.kinds[storage.data_ptr()] = kind
                self.num_bytes[storage.data_ptr()] = storage.nbytes()

    def kind(self, address: int) -> Kind:
        return self.kinds[address] if address in self.num_bytes else "other"

    def total(self, kind: Kind) -> int:
        return sum(n for address, n in self.num_bytes.items() if self.kinds[address] == kind)


def held_tensors(
    *,
    weights: Iterable[Tensor],
    masters: Iterable[Tensor],
    moments: Iterable[Tensor],
    dtype: torch.dtype,
    device: torch.device,
    host_bytes: int = 0,
) -> Held:
    """What exists between two steps. Masters in the format that computes, `dtype`, are the weights
    themselves. `host_bytes` are those of gradients that lie on the host."""
    held = Held()
    held.add("masters", (master for master in masters if master.dtype != dtype), device)
    held.add("weights", weights, device)
    held.add("optimizer", moments, device)
    if device.type != "cpu" and host_bytes:
        held.on_host[0] = host_bytes
    return held


class MemoryProbe:
    """Watches one step. Inactive until `measure`; marking costs nothing then."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_active = False
        self._gathered: set[int] = set()
        self._gradients: set[int] = set()

    @contextmanager
    def forward(self, weights: Callable[[], Iterable[Tensor]]) -> Generator[None]:
        """Around the forward of a micro-batch. `weights` are the module's when it has ended, which
        with several processes may have been gathered."""
        if not self._is_active:
            yield
            return
        with record_function(_FORWARD):
            yield
        self._gathered.update(_addresses(weights()))

    @contextmanager
    def passes(self, gradients: Callable[[], Iterable[Tensor]]) -> Generator[None]:
        """Around all passes of the step. `gradients` are those they leave."""
        if not self._is_active:
            yield
            return
        with record_function(_PASSES):
            yield
        self._gradients.update(_addresses(gradients()))

    def measure(self, step: Callable[[], object], held: Held) -> MemoryUse:
        """Run `step`, which is to leave as much memory in use as it finds."""
        self._gathered, self._gradients = set(), set()
        base = sum(held.num_bytes.values())
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
        gathered = dict.fromkeys(self._gathered - held.num_bytes.keys(), "weights")
        return play(
            sorted(events, key=lambda event: event.time),
            held=replace(held, kinds={**held.kinds, **gathered}),
            base=base,
            marks=Marks(
                gradients=self._gradients,
                forwards=sorted(spans[_FORWARD]),
                passes_end=max((end for _, end in spans[_PASSES]), default=0),
            ),
        )


def play(events: list[Event], *, held: Held, base: int, marks: Marks) -> MemoryUse:
    """From a record of allocations, in order, to what existed when.

    `base` bytes exist before the first event, those of `held` and others. `held.kinds` also has the
    addresses of weights that are gathered during the step.
    """
    now: dict[Kind, int] = {kind: held.total(kind) for kind in KINDS}
    now["other"] += base - sum(now.values())
    peak, peak_time, at_peak, largest = base, 0, dict(now), dict(now)
    for time, kind, num_bytes in _changes(events, held, marks):
        if kind == "other" and now[kind] + num_bytes < 0:
            continue  # given back, and nobody had counted it
        now[kind] += num_bytes
        largest[kind] = max(largest[kind], now[kind])
        if (total := sum(now.values())) > peak:
            peak, peak_time, at_peak = total, time, dict(now)
    return MemoryUse(
        peak=peak,
        phase=marks.phase(peak_time),
        at_peak=at_peak,
        largest=largest,
        host=sum(held.on_host.values()),
    )


def _changes(events: list[Event], held: Held, marks: Marks) -> Iterable[tuple[int, Kind, int]]:
    """Time, kind and bytes of every change, in order.

    A block that is taken where another one was ends that: the record does not see what threads of
    gloo and NCCL give back.
    """
    changes: list[tuple[int, Kind, int]] = []
    taken: dict[int, tuple[int, Event]] = {}  # by address: place in `changes`, and how it began

    def give_back(address: int, time: float) -> Kind:
        place, event = taken.pop(address)
        kind = _kind(event, time, held, marks)
        changes[place] = (event.time, kind, event.num_bytes)
        return kind

    for event in events:
        address, is_known = event.address, event.address in taken
        if event.num_bytes < 0:
            kind = give_back(address, event.time) if is_known else held.kind(address)
            changes.append((event.time, kind, event.num_bytes))
            continue
        if is_known:
            num_bytes = taken[address][1].num_bytes
            changes.append((event.time, give_back(address, event.time), -num_bytes))
        taken[address] = len(changes), event
        changes.append((event.time, "other", event.num_bytes))  # its kind is known at its end
    for address in [*taken]:
        give_back(address, math.inf)
    return changes


def _kind(event: Event, end: float, held: Held, marks: Marks) -> Kind:
    """Of a block that is taken at `event` and given back at `end`."""
    if event.address in marks.gradients and event.time < marks.passes_end <= end:
        return "gradients"
    if marks.outlives_forward(event.time, end):
        is_gathered = held.kinds.get(event.address) == "weights"
        return "weights" if is_gathered else "activations"
    return "other"


def _addresses(tensors: Iterable[Tensor]) -> set[int]:
    storages = [local_part(tensor.detach()).untyped_storage() for tensor in tensors]
    return {storage.data_ptr() for storage in storages if storage.nbytes()}


def _walk(nodes: Iterable[Any]) -> Iterator[Any]:
    """All events of the tree, without recursion: it is as deep as the calls it records."""
    stack = list(nodes)
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children)
