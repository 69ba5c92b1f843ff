"""Offloading of the trainer's state to host memory.

Five things can wait there: the inputs of recomputed layers (`ActivationOffload`), the optimizer's
masters and moments, which each step streams through the device piece by piece (`stream_buckets`),
gradients between micro-batches and until that step (`host_gradients.py`), all of the trainer's
state while an engine generates, and frozen models while nothing asks for their scores
(`StateOffload`).

Copies run on streams of their own, from and to page-locked buffers that are used again: neither
device nor host memory grows from step to step. On a CPU the same copies happen at once.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hone.errors import UserError
from hone.hardware import GIB

__all__ = [
    "ActivationOffload",
    "Bucket",
    "CopyStream",
    "StateOffload",
    "host_tensors",
    "layout_of",
    "mark_of",
    "stream_buckets",
    "wait_for",
]

_ALIGNMENT = 256
_BUFFER_STEP = 2 << 20


Layout = Sequence[tuple[torch.Size, torch.dtype]]
"""Shape and dtype of tensors that lie one after the other, each at an aligned place."""


def host_tensors(layout: Layout, device: torch.device, *, purpose: str) -> list[Tensor]:
    """Contiguous tensors in host memory, page-locked where `device` is a GPU.

    The pages belong to no other allocation and go back to the system with the last of the tensors.
    torch's own pinned memory is rounded up to a power of two, and cached for ever. Raises UserError
    where the host has less memory or will not lock it; `purpose` is the beginning of its message:
    what the memory is for, and how to need less.
    """
    num_bytes = max(_num_bytes(layout), 1)
    available = psutil.virtual_memory().available
    if num_bytes > available:
        raise UserError(
            f"{purpose}: this takes {num_bytes / GIB:.1f} GiB of host memory, and "
            f"{available / GIB:.1f} GiB are free"
        )
    pages = mmap.mmap(-1, num_bytes)
    flat = torch.frombuffer(pages, dtype=torch.uint8)
    if device.type == "cuda":
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        flat.zero_()  # all cores touch the pages at once; locking alone would do so page by page
        runtime: Any = torch.cuda.cudart()
        address = flat.data_ptr()
        status = int(runtime.cudaHostRegister(address, num_bytes, 0))
        if status != 0:
            raise UserError(
                f"{purpose}: the system does not lock {num_bytes / GIB:.1f} GiB of host memory "
                f"(CUDA error {status}); raise the limit that `ulimit -l` shows"
            )
        # Every tensor holds the pages.
        release = weakref.finalize(pages, runtime.cudaHostUnregister, address)
        release.atexit = False  # the driver ends with the process
    return _carve(flat, layout)


def layout_of(tensors: Iterable[Tensor], dtype: torch.dtype | None = None) -> Layout:
    """The layout of tensors of these shapes, of `dtype` if given."""
    return [(tensor.shape, dtype or tensor.dtype) for tensor in tensors]


class CopyStream:
    """A CUDA stream for copies. On a CPU there is none, and every copy is synchronous."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def after(self, *marks: torch.Event | None) -> Generator[None]:
        """Context in which launches go to this stream and run after the marked work."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            for mark in marks:
                if mark is not None:
                    self._stream.wait_event(mark)
            yield

    def mark(self) -> torch.Event | None:
        """Event at the end of the work that this stream has so far."""
        return None if self._stream is None else self._stream.record_event()


def mark_of(device: torch.device) -> torch.Event | None:
    """Event at the end of the work that the current stream has so far."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def wait_for(mark: torch.Event | None) -> None:
    """Let the current stream wait for the event; the host does not wait."""
    if mark is not None:
        torch.cuda.current_stream().wait_event(mark)


class ActivationOffload:
    """Keeps tensors saved for backward in host memory, and fetches them one ahead of their use.

    Backward needs tensors in the opposite order of their saving. The copy to the host overlaps with
    the layer that saved the tensor, the copy back with the backward of the layer above it. The
    newest tensor also stays on the device, since backward needs it first.
    """

    def __init__(self) -> None:
        self._copies: CopyStream | None = None
        self._free: list[Tensor] = []
        """Free buffers in host memory, flat bytes."""
        self._newest: tuple[_Kept, Tensor] | None = None
        self.num_buffers = 0
        """Host buffers that exist, in use or free."""

    def hooks(self) -> AbstractContextManager[None]:
        """Context in which tensors that autograd saves are kept in host memory."""
        return saved_tensors_hooks(self._keep, self._fetch)

    def _keep(self, tensor: Tensor) -> _Kept | Tensor:
        if tensor.numel() == 0:  # torch 2.11 saves one for each recomputed layer
            return tensor
        value = tensor.detach().contiguous()
        if self._copies is None:
            self._copies = CopyStream(value.device)
        below = self._release_newest()
        buffer = self._take(value.nbytes, value.device)
        (host,) = _carve(buffer, layout_of([value]))
        kept = _Kept(host, value.device, below)
        weakref.finalize(kept, self._free.append, buffer)
        with self._copies.after(mark_of(value.device)):
            kept.host.copy_(value, non_blocking=True)
            kept.is_out = self._copies.mark()
        self._newest = kept, value
        return kept

    def _fetch(self, kept: _Kept | Tensor) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if self._newest is not None and self._newest[0] is kept:
            value = self._newest[1]
        else:
            self._start(kept)
            assert kept.incoming is not None
            value, is_in = kept.incoming
            kept.incoming = None
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
        """Drop the newest tensor from the device. Later work, which may get the same memory, waits
        until its copy is complete."""
        if self._newest is None:
            return None
        kept, _ = self._newest
        wait_for(kept.is_out)
        self._newest = None
        return weakref.ref(kept)

    def _take(self, num_bytes: int, device: torch.device) -> Tensor:
        """The smallest free buffer that is large enough; else a new one in place of a small one.

        A buffer is free once nothing will read it. Copies of one stream run in order, so that a new
        one into it starts after the last one out of it.
        """
        self._free.sort(key=lambda buffer: buffer.nbytes)
        for index, buffer in enumerate(self._free):
            if buffer.nbytes >= num_bytes:
                return self._free.pop(index)
        if self._free:
            del self._free[0]
            self.num_buffers -= 1
        self.num_buffers += 1
        size = torch.Size([-(-num_bytes // _BUFFER_STEP) * _BUFFER_STEP])
        (buffer,) = host_tensors(
            [(size, torch.uint8)],
            device,
            purpose="trainer.offload_activations keeps the inputs of layers on the host; turn it "
            "off, or lower trainer.max_tokens_per_microbatch",
        )
        return buffer


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Kept:
    """A saved tensor in host memory."""

    host: Tensor
    device: torch.device
    below: weakref.ref[_Kept] | None
    """The tensor that was saved before this one, which backward needs next."""
    is_out: torch.Event | None = None
    incoming: tuple[Tensor, torch.Event | None] | None = None


class Bucket(NamedTuple):
    """Contiguous host tensors that are copied to the device together, or their copies there."""

    changed: Sequence[Tensor]
    read: Sequence[Tensor] = ()
    """Tensors that are read on the device and not copied back."""


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
            layout = layout_of((*bucket.changed, *bucket.read))
            if slots[slot].nbytes < _num_bytes(layout):
                wait_for(has_left[slot])  # before its memory is used again
                slots[slot] = torch.empty(_num_bytes(layout), dtype=torch.uint8, device=device)
                has_left[slot] = mark_of(device)
            carved, num_changed = _carve(slots[slot], layout), len(bucket.changed)
            staged = Bucket(carved[:num_changed], carved[num_changed:])
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

    Host buffers are allocated at the first `offload` and used again for tensors of the same layout.
    """

    def __init__(
        self,
        purpose: str = "the trainer sleeps with its state on the host (trainer.enable_sleep)",
        *,
        is_frozen: bool = False,
    ) -> None:
        """`purpose` is as of `host_tensors`. With `is_frozen` the tensors are always the same and
        never change, so they are copied to the host once."""
        self._purpose = purpose
        self._is_frozen = is_frozen
        self._hosts: list[Tensor] = []
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []

    @property
    def is_away(self) -> bool:
        """Whether the tensors are away."""
        return bool(self._away)

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors to the host and free their device memory, down to the driver.

        Until `restore` none of them may be used. Memory that torch does not own, such as a mapped
        file on a CPU, stays. Raises UserError, with nothing moved, where the host has too little
        memory.
        """
        assert not self._away, "tensors that are away would be lost"
        own = (t.untyped_storage() for t in tensors)
        storages = {s.data_ptr(): s for s in own if s.nbytes() and s.resizable()}
        if not storages:
            return
        device = next(iter(storages.values())).device
        layout = [(torch.Size([s.nbytes()]), torch.uint8) for s in storages.values()]
        is_on_host = self._is_frozen and layout_of(self._hosts) == layout
        if layout_of(self._hosts) != layout:
            self._hosts = []  # freed before others are asked for
            self._hosts = host_tensors(layout, device, purpose=self._purpose)
        away = list(zip(storages.values(), self._hosts, strict=True))
        for storage, host in () if is_on_host else away:
            host.copy_(_whole_storage(storage), non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        _free(storages.values())
        self._away = away

    def host_copy(self, tensor: Tensor) -> Tensor | None:
        """The host copy of a tensor that is away; None for other tensors."""
        own = tensor.untyped_storage()
        for storage, host in self._away:
            if storage is own:
                values = host.view(tensor.dtype)
                start = values.storage_offset() + tensor.storage_offset()
                return values.as_strided(tensor.shape, tensor.stride(), start)
        return None

    def restore(self) -> None:
        """Bring every tensor back. Where the device has too little memory, all stay away and
        torch.OutOfMemoryError is raised; it can be called again later."""
        try:
            for storage, host in self._away:
                storage.resize_(host.nbytes)
        except torch.OutOfMemoryError:
            _free(storage for storage, _ in self._away)
            raise
        for storage, host in self._away:
            _whole_storage(storage).copy_(host, non_blocking=True)
        self._away = []


def _free(storages: Iterable[torch.UntypedStorage]) -> None:
    """Return the memory to the driver, from which an engine allocates."""
    is_cuda = False
    for storage in storages:
        is_cuda = storage.device.type == "cuda"
        storage.resize_(0)
    if is_cuda:
        torch.cuda.empty_cache()


def _whole_storage(storage: torch.UntypedStorage) -> Tensor:
    """The bytes of a storage as a tensor outside autograd."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy_all(sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)


def _num_bytes(layout: Layout) -> int:
    return sum(_aligned(prod(shape) * dtype.itemsize) for shape, dtype in layout)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _carve(flat: Tensor, layout: Layout) -> list[Tensor]:
    tensors: list[Tensor] = []
    offset = 0
    for shape, dtype in layout:
        num_bytes = prod(shape) * dtype.itemsize
        tensors.append(flat[offset : offset + num_bytes].view(dtype).view(shape))
        offset += _aligned(num_bytes)
    return tensors
