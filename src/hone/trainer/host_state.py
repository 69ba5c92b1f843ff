"""Masters and gradients in host memory, as an optimizer's step finds them there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hone.checkpoint.sharded import local_part
from hone.models.manifest import RoundedChecksums
from hone.trainer.offload import BUCKET_BYTES, CopyStream, HostBuffer, mark_of, wait_for

__all__ = [
    "HostGradients",
    "HostMasters",
    "Piece",
    "StreamedGradients",
    "norm_of_pieces",
    "pieces_of",
]

_PIECE_ELEMENTS = BUCKET_BYTES // 4
"""Gradients are copied, and their norms taken, in pieces of so many elements at most."""


@dataclass(kw_only=True, eq=False)
class HostMasters:
    """Float32 masters in pinned host memory, and where a step puts the weights it makes of them.

    Gradients that stay on the device lie beside them in `gradients`, float32. What a step rounds is
    described where it is computed: to compare weights with masters, nothing crosses the bus.
    """

    masters: dict[str, nn.Parameter]
    device: torch.device
    """Where steps are computed."""
    weights: dict[str, nn.Parameter] = field(default_factory=dict[str, nn.Parameter])
    """What is to have the rounded master, on the device. The parameters themselves: an engine that
    shares them may give them other memory (`hone.models.layer_ops.merge_rows`)."""
    gradients: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """What the next step applies, under the weights' names. A step clears it."""
    buffer: HostBuffer | None = None
    """What the masters lie in, where that is this object's own."""
    checksums: RoundedChecksums = field(default_factory=RoundedChecksums)
    """Of what the masters round to, for all `weights`."""

    @classmethod
    def copied(cls, weights: Mapping[str, nn.Parameter], device: torch.device) -> HostMasters:
        """Copies of `weights`, local tensors of any float format. Raises UserError where the host
        has too little memory."""
        copied = {name: weight.detach() for name, weight in weights.items()}
        layout = [(weight.shape, _wide(weight.dtype)) for weight in copied.values()]
        buffer = HostBuffer.for_layout(
            layout, device, purpose="trainer.offload_optimizer keeps master weights on the host"
        )
        masters = dict(zip(copied, buffer.tensors(layout), strict=True))
        with torch.no_grad():
            for name, weight in copied.items():
                masters[name].copy_(weight)
        found = cls(
            masters={name: nn.Parameter(master) for name, master in masters.items()},
            device=device,
            weights=dict(weights),
            buffer=buffer,
        )
        for name, weight in copied.items():
            found.checksums.add([(name, 0, weight.reshape(-1).to(device))], weight.dtype)
        return found

    @torch.no_grad()
    def take(self, name: str, saved: Tensor) -> None:
        """Give a master the values `saved`, and its weight what they round to."""
        master = self.masters[name].detach()
        master.copy_(saved)
        target = self.weights.get(name)
        if target is None:
            return
        flat = target.detach().view(-1)
        start = 0
        for values in pieces_of(master):
            piece = Piece(name, start, start + values.numel())
            on_device = values.to(self.device)
            self.record([(piece, on_device)])
            flat[piece.start : piece.stop].copy_(on_device)
            start = piece.stop

    def record(self, moved: Iterable[tuple[Piece, Tensor]]) -> None:
        """Note what masters round to that have moved: pieces and their values on the device, each
        parameter's in order. Independent of where a step writes them."""
        by_dtype: dict[torch.dtype, list[tuple[str, int, Tensor]]] = {}
        for piece, values in moved:
            if (weight := self.weights.get(piece.name)) is not None:
                by_dtype.setdefault(weight.dtype, []).append((piece.name, piece.start, values))
        for dtype, pieces in by_dtype.items():
            self.checksums.add(pieces, dtype)

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Add in float32 to what the weight's gradient has so far; `gradient` is left alone."""
        if name in self.gradients:
            self.gradients[name].add_(gradient)
        else:
            self.gradients[name] = gradient.to(torch.float32, copy=True)


class HostGradients(ABC):
    """Gradients in host memory that the next step applies."""

    scale: Tensor | None = None
    """What a step multiplies them with, a scalar on the device; None: nothing."""

    def __init__(self, device: torch.device) -> None:
        """`device` computes steps."""
        self.device = device

    @property
    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Local float32 tensors by parameter, not scaled yet, in the order of the parameters. They
        have arrived."""

    @property
    @abstractmethod
    def norms(self) -> dict[str, Tensor]:
        """2-norms of the pieces of each (`pieces_of`), not scaled, [K] on the device."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Of host memory, when all gradients are there."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all gradients, and the scale."""


class Piece(NamedTuple):
    """Elements `start` to `stop` of a flattened parameter."""

    name: str
    start: int
    stop: int


class StreamedGradients(HostGradients):
    """Adds gradients up on the device, and keeps the sums in pinned host memory between.

    A gradient that backward brings is added to what the host had, which has been fetched meanwhile:
    the order in which backward brings them is known from the first micro-batch. The sums, and so
    their bits, are those of gradients that stay on the device. Copies go both ways beside backward,
    each way over a window of device memory; where that is full, backward waits.
    """

    def __init__(
        self, like: Mapping[str, Tensor], device: torch.device, *, window_bytes: int
    ) -> None:
        """Of parameters `like`; of DTensors this process's part. The window is `window_bytes`, or a
        bucket where that is more. A compiled layer brings all its gradients at once: a window of
        that size lets the next layer proceed. Raises UserError where the host has too little
        memory.
        """
        super().__init__(device)
        parts = {name: local_part(tensor) for name, tensor in like.items()}
        layout = [(part.shape, _wide(part.dtype)) for part in parts.values()]
        self._buffer = HostBuffer.for_layout(
            layout, device, purpose="trainer.offload_gradients keeps float32 gradients on the host"
        )
        self._host = dict(zip(parts, self._buffer.tensors(layout), strict=True))
        self._window = max(window_bytes, BUCKET_BYTES)
        self._norms: dict[str, Tensor] = {}
        self._order: dict[Piece, int] = {}
        """In which backward brings pieces."""
        self._arriving, self._going = CopyStream(device), CopyStream(device)
        self._stored: dict[Piece, torch.Event | None] = {}
        self._ahead: dict[Piece, tuple[Tensor, torch.Event | None]] = {}
        self._leaving: deque[tuple[Tensor, torch.Event | None]] = deque()

    @torch.no_grad()
    def add(self, name: str, gradient: Tensor) -> None:
        """Add in float32 to what the parameter's gradient has so far. `gradient`, on the device,
        may be freed afterwards."""
        host, is_first = self._host[name], name not in self._norms
        norms: list[Tensor] = []
        start = 0
        for fresh in pieces_of(gradient.detach()):
            piece = Piece(name, start, start + fresh.numel())
            start = piece.stop
            if is_first:
                value = fresh.to(host.dtype, copy=True)
                self._order.setdefault(piece, len(self._order))
            else:
                value = self._fetched(piece).add_(fresh)
                self._fetch_ahead(piece)
            norms.append(norm_of_pieces([value]))
            self._store(piece, value)
        self._norms[name] = torch.stack(norms)

    @property
    def tensors(self) -> dict[str, Tensor]:
        self._settle()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return {name: host for name, host in self._host.items() if name in self._norms}

    @property
    def norms(self) -> dict[str, Tensor]:
        return {name: self._norms[name] for name in self._host if name in self._norms}

    @property
    def num_bytes(self) -> int:
        return sum(host.nbytes for host in self._host.values())

    def clear(self) -> None:
        self._settle()
        self._norms.clear()
        self.scale = None

    def _store(self, piece: Piece, value: Tensor) -> None:
        while self._leaving and self._bytes_leaving + value.nbytes > self._window:
            self._release_oldest()
        with self._going.after(mark_of(self.device)):
            self._on_host(piece).copy_(value, non_blocking=True)
            self._stored[piece] = self._going.mark()
        self._leaving.append((value, self._stored[piece]))

    @property
    def _bytes_leaving(self) -> int:
        return sum(value.nbytes for value, _ in self._leaving)

    def _release_oldest(self) -> None:
        """Free what has been leaving for longest. Later work waits until it has: it may be given
        the same memory."""
        _, is_out = self._leaving.popleft()
        wait_for(is_out)

    def _fetched(self, piece: Piece) -> Tensor:
        if piece not in self._ahead:
            self._fetch(piece)
        value, is_in = self._ahead.pop(piece)
        wait_for(is_in)
        return value

    def _fetch(self, piece: Piece) -> None:
        host = self._on_host(piece)
        value = torch.empty_like(host, device=self.device)
        # The memory may still be read by earlier work of the current stream.
        with self._arriving.after(mark_of(self.device), self._stored[piece]):
            value.copy_(host, non_blocking=True)
            self._ahead[piece] = value, self._arriving.mark()

    def _fetch_ahead(self, piece: Piece) -> None:
        """Fetch what backward will bring after `piece`, a window of it."""
        num_bytes = sum(value.nbytes for value, _ in self._ahead.values())
        for following in islice(self._order, self._order[piece] + 1, None):
            if num_bytes >= self._window or following.name not in self._norms:
                return
            if following not in self._ahead:
                self._fetch(following)
                num_bytes += self._ahead[following][0].nbytes

    def _settle(self) -> None:
        """Free all device memory; current work waits until all copies are done."""
        while self._leaving:
            self._release_oldest()
        for _, is_in in self._ahead.values():
            wait_for(is_in)
        self._ahead.clear()

    def _on_host(self, piece: Piece) -> Tensor:
        return self._host[piece.name].view(-1)[piece.start : piece.stop]


def pieces_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """A local tensor, flat, in the pieces that are copied."""
    return tensor.reshape(-1).split(_PIECE_ELEMENTS)


def norm_of_pieces(tensors: Iterable[Tensor]) -> Tensor:
    """2-norm of local tensors, a scalar, in the order of operations that all gradients share: the
    norm of their pieces' norms."""
    return nn.utils.get_total_norm([piece for tensor in tensors for piece in pieces_of(tensor)])


def _wide(dtype: torch.dtype) -> torch.dtype:
    """float32, or wider where `dtype` is."""
    return torch.promote_types(dtype, torch.float32)
