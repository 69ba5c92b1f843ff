"""Gradients that wait in host memory, between micro-batches and for the optimizer's step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hone.checkpoint.sharded import local_part
from hone.trainer.offload import BUCKET_BYTES, CopyStream, host_tensors, mark_of, wait_for
from hone.trainer.precision import accumulation_dtype

__all__ = ["HostGradients", "Piece", "norm_of_pieces", "pieces_of"]

_PIECE_ELEMENTS = BUCKET_BYTES // 4
"""Gradients are copied, and their norms taken, in pieces of so many elements at most."""


class Piece(NamedTuple):
    """Elements `start` to `stop` of what this process holds of a parameter, flat."""

    name: str
    start: int
    stop: int


class HostGradients:
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
        self.device = device
        parts = {name: local_part(tensor) for name, tensor in like.items()}
        layout = [(part.shape, accumulation_dtype(part.dtype)) for part in parts.values()]
        purpose = "trainer.offload gradients keeps float32 gradients on the host"
        self._host = dict(zip(parts, host_tensors(layout, device, purpose=purpose), strict=True))
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
        """Local float32 tensors by parameter, in the order of the parameters. They have
        arrived."""
        self._settle()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return {name: host for name, host in self._host.items() if name in self._norms}

    @property
    def norms(self) -> dict[str, Tensor]:
        """2-norms of the pieces of each (`pieces_of`), [K] on the device."""
        return {name: self._norms[name] for name in self._host if name in self._norms}

    @property
    def num_bytes(self) -> int:
        """Of host memory."""
        return sum(host.nbytes for host in self._host.values())

    def clear(self) -> None:
        """Forget all gradients."""
        self._settle()
        self._norms.clear()

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
