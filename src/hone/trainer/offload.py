"""What of training waits in host memory, and how it is copied.

Four things can wait there: the inputs of recomputed layers (`ActivationOffload`), the optimizer's
masters and moments, which each step streams through the device piece by piece (`stream_buckets`),
gradients between micro-batches and until that step (`host_state.py`), and all of the trainer's
state while an engine generates (`StateOffload`).

Copies run on streams of their own, from and to page-locked buffers that are used again: neither
device nor host memory grows from step to step. On a CPU the same copies happen at once.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import prod
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hone.config.errors import UserError

__all__ = [
    "BUCKET_BYTES",
    "ActivationOffload",
    "Bucket",
    "CopyStream",
    "HostBuffer",
    "StateOffload",
    "mark_of",
    "stream_buckets",
    "wait_for",
    "whole_storage",
]

BUCKET_BYTES = 128 << 20
"""Device memory of one of the two buckets that a step streams through: long enough copies to run
at the bus's rate, and 256 MiB in all."""

_ALIGNMENT = 256
_BUFFER_STEP = 2 << 20
_GIB = 1 << 30


class HostBuffer:
    """`num_bytes` of host memory, page-locked where `device` is a GPU.

    The pages belong to no other allocation and are given back to the system with this object.
    torch's own pinned memory is rounded up to a power of two, and cached for ever. Raises UserError
    where the host has less memory or will not lock it.
    """

    def __init__(self, num_bytes: int, device: torch.device, *, purpose: str) -> None:
        """`purpose` says in an error what the memory was for and how to need less."""
        self.num_bytes = max(num_bytes, 1)
        available = psutil.virtual_memory().available
        if self.num_bytes > available:
            raise UserError(
                f"{purpose}: this takes {num_bytes / _GIB:.1f} GiB of host memory, and "
                f"{available / _GIB:.1f} GiB are free"
            )
        pages = mmap.mmap(-1, self.num_bytes)
        self.bytes = torch.frombuffer(pages, dtype=torch.uint8)
        if device.type == "cuda":
            if hasattr(mmap, "MADV_HUGEPAGE"):
                pages.madvise(mmap.MADV_HUGEPAGE)
            self.bytes.zero_()  # touched by all cores at once; locking would do it page by page
            self._lock(purpose)

    @classmethod
    def for_layout(
        cls, layout: Sequence[tuple[torch.Size, torch.dtype]], device: torch.device, *, purpose: str
    ) -> HostBuffer:
        """A buffer from which `tensors` can make just these."""
        return cls(_num_bytes(layout), device, purpose=purpose)

    def _lock(self, purpose: str) -> None:
        address = self.bytes.data_ptr()
        status = int(_runtime().cudaHostRegister(address, self.num_bytes, 0))
        if status != 0:
            raise UserError(
                f"{purpose}: the system does not lock {self.num_bytes / _GIB:.1f} GiB of host "
                f"memory (CUDA error {status}); raise the limit that `ulimit -l` shows"
            )
        release = weakref.finalize(self, _unlock, address, self.bytes)
        release.atexit = False  # the driver ends with the process

    def tensors(self, layout: Sequence[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
        """Contiguous tensors of these shapes and formats, one after the other."""
        return _carve(self.bytes, layout)


def _unlock(address: int, _keep_until_unlocked: Tensor) -> None:
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()


class CopyStream:
    """A stream beside the current one. On a CPU there is none, and every copy ends at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def after(self, *marks: torch.Event | None) -> Generator[None]:
        """What is launched inside runs on this stream, once the marked work is done."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            for mark in marks:
                if mark is not None:
                    self._stream.wait_event(mark)
            yield

    def mark(self) -> torch.Event | None:
        """The end of what the stream has been given so far."""
        return None if self._stream is None else self._stream.record_event()


def mark_of(device: torch.device) -> torch.Event | None:
    """The end of what the current stream has been given so far."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def wait_for(mark: torch.Event | None) -> None:
    """Let the current stream wait; the host does not."""
    if mark is not None:
        torch.cuda.current_stream().wait_event(mark)


class ActivationOffload:
    """Keeps tensors saved for backward in host memory, and fetches them one ahead of their use.

    Tensors are asked for in the opposite order of their saving. The copy out runs beside the layer
    that saved the tensor, the copy back beside the backward of the layer above it. The newest
    tensor stays on the device as well: it is the first that is asked for.
    """

    def __init__(self) -> None:
        self._copies: CopyStream | None = None
        self._free: list[HostBuffer] = []
        self._newest: tuple[_Kept, Tensor] | None = None
        self.num_buffers = 0
        """Host buffers that exist, in use or free."""

    def hooks(self) -> AbstractContextManager[None]:
        """Tensors saved inside are kept in host memory."""
        return saved_tensors_hooks(self._keep, self._fetch)

    def _keep(self, tensor: Tensor) -> _Kept:
        value = tensor.detach().contiguous()
        if self._copies is None:
            self._copies = CopyStream(value.device)
        below = self._release_newest()
        kept = _Kept(value, self._take(value.nbytes, value.device), below)
        weakref.finalize(kept, self._free.append, kept.buffer)
        with self._copies.after(mark_of(value.device)):
            kept.host.copy_(value, non_blocking=True)
            kept.is_out = self._copies.mark()
        self._newest = kept, value
        return kept

    def _fetch(self, kept: _Kept) -> Tensor:
        if self._newest is not None and self._newest[0] is kept:
            value = self._newest[1]
        else:
            self._start(kept)
            value, is_in = kept.take()
            wait_for(is_in)
        self._release_newest()
        below = None if kept.below is None else kept.below()
        if below is not None:
            self._start(below)
        return value

    def _start(self, kept: _Kept) -> None:
        """Start the copy back, unless it was started."""
        assert self._copies is not None
        if kept.incoming is None:
            value = torch.empty_like(kept.host, device=kept.device)
            # The memory may still be read by earlier work of the current stream.
            with self._copies.after(mark_of(kept.device)):
                value.copy_(kept.host, non_blocking=True)
                kept.incoming = value, self._copies.mark()

    def _release_newest(self) -> weakref.ref[_Kept] | None:
        """Drop the newest tensor from the device. Later work waits until it has left: it may be
        given the same memory."""
        if self._newest is None:
            return None
        kept, _ = self._newest
        wait_for(kept.is_out)
        self._newest = None
        return weakref.ref(kept)

    def _take(self, num_bytes: int, device: torch.device) -> HostBuffer:
        """The smallest free buffer that is large enough; else a new one in place of a small one.

        A buffer is free once nothing will read it. Copies of one stream run in order, so that a new
        one into it starts after the last one out of it.
        """
        fitting = [b for b in self._free if b.num_bytes >= num_bytes]
        if fitting:
            buffer = min(fitting, key=lambda b: b.num_bytes)
            self._free.remove(buffer)
            return buffer
        if self._free:
            self._free.remove(min(self._free, key=lambda b: b.num_bytes))
            self.num_buffers -= 1
        self.num_buffers += 1
        return HostBuffer(
            -(-num_bytes // _BUFFER_STEP) * _BUFFER_STEP,
            device,
            purpose="trainer.offload_activations keeps the inputs of layers on the host; turn it "
            "off, or lower trainer.max_tokens_per_microbatch",
        )


class _Kept:
    """A saved tensor in host memory."""

    def __init__(self, value: Tensor, buffer: HostBuffer, below: weakref.ref[_Kept] | None) -> None:
        self.device = value.device
        self.buffer = buffer
        (self.host,) = buffer.tensors([(value.shape, value.dtype)])
        self.below = below
        """What was saved before, and is asked for next."""
        self.is_out: torch.Event | None = None
        self.incoming: tuple[Tensor, torch.Event | None] | None = None

    def take(self) -> tuple[Tensor, torch.Event | None]:
        assert self.incoming is not None
        incoming, self.incoming = self.incoming, None
        return incoming


class Bucket(NamedTuple):
    """Contiguous host tensors that are copied to the device together, or their copies there."""

    changed: Sequence[Tensor]
    read: Sequence[Tensor] = ()
    """What does not come back."""


def stream_buckets(
    buckets: Iterable[Bucket],
    update: Callable[[int, Bucket], None],
    device: torch.device,
) -> None:
    """Bring each bucket of host tensors to the device, let `update` change it there, put it back.

    `update` gets the bucket's number and the bucket as it is on the device. Two exist there at a
    time: one is filled while the other is changed and leaves, so that both directions of the bus
    are busy. Afterwards the host tensors can be read and the device memory is free.
    """
    arriving, leaving = CopyStream(device), CopyStream(device)
    slots = [torch.empty(0, dtype=torch.uint8, device=device)] * 2
    has_left: list[torch.Event | None] = [None, None]
    try:
        for index, bucket in enumerate(buckets):
            slot = index % 2
            layout = [(tensor.shape, tensor.dtype) for part in bucket for tensor in part]
            if slots[slot].nbytes < _num_bytes(layout):
                wait_for(has_left[slot])  # before its memory is anybody's
                slots[slot] = torch.empty(_num_bytes(layout), dtype=torch.uint8, device=device)
                has_left[slot] = mark_of(device)
            carved = iter(_carve(slots[slot], layout))
            staged = Bucket(*([next(carved) for _ in part] for part in bucket))
            with arriving.after(has_left[slot]):
                _copy_all((*bucket.changed, *bucket.read), (*staged.changed, *staged.read))
                has_arrived = arriving.mark()
            wait_for(has_arrived)
            update(index, staged)
            with leaving.after(mark_of(device)):
                _copy_all(staged.changed, bucket.changed)
                has_left[slot] = leaving.mark()
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # host tensors are read, buckets freed from here on


class StateOffload:
    """Moves device tensors to host memory and back, in place: references to them stay valid.

    The host buffer is made in the first round and used again in every other.
    """

    def __init__(self) -> None:
        self._buffer: HostBuffer | None = None
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []

    @property
    def is_away(self) -> bool:
        """Whether the tensors are away."""
        return bool(self._away)

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors to the host and free their device memory, down to the driver.

        Until `restore` none of them may be used. Raises UserError, with nothing moved, where the
        host has too little memory.
        """
        assert not self._away, "tensors that are away would be lost"
        storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in tensors) if s.nbytes()}
        if not storages:
            return
        device = next(iter(storages.values())).device
        layout = [(torch.Size([s.nbytes()]), torch.uint8) for s in storages.values()]
        if self._buffer is None or self._buffer.num_bytes < _num_bytes(layout):
            self._buffer = None  # freed before the larger one is asked for
            self._buffer = HostBuffer.for_layout(
                layout, device, purpose="the trainer sleeps with its state on the host"
            )
        away = list(zip(storages.values(), self._buffer.tensors(layout), strict=True))
        for storage, host in away:
            host.copy_(whole_storage(storage), non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        _free(storages.values())
        self._away = away

    def restore(self) -> None:
        """Bring every tensor back. Where the device has too little memory, all stay away and
        torch.OutOfMemoryError is raised; legal again later."""
        try:
            for storage, host in self._away:
                storage.resize_(host.nbytes)
        except torch.OutOfMemoryError:
            _free(storage for storage, _ in self._away)
            raise
        for storage, host in self._away:
            whole_storage(storage).copy_(host, non_blocking=True)
        self._away = []


def _free(storages: Iterable[torch.UntypedStorage]) -> None:
    """Give the memory to the driver, from which an engine takes its own."""
    is_cuda = False
    for storage in storages:
        is_cuda = storage.device.type == "cuda"
        storage.resize_(0)
    if is_cuda:
        torch.cuda.empty_cache()


def whole_storage(storage: torch.UntypedStorage) -> Tensor:
    """Its bytes, as a tensor that autograd does not know."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy_all(sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)


def _num_bytes(layout: Sequence[tuple[torch.Size, torch.dtype]]) -> int:
    """Bytes of tensors one after the other, each at an aligned place."""
    return sum(_aligned(prod(shape) * dtype.itemsize) for shape, dtype in layout)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _carve(flat: Tensor, layout: Sequence[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
    tensors: list[Tensor] = []
    offset = 0
    for shape, dtype in layout:
        num_bytes = prod(shape) * dtype.itemsize
        tensors.append(flat[offset : offset + num_bytes].view(dtype).view(shape))
        offset += _aligned(num_bytes)
    return tensors
