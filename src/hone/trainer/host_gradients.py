"""Gradients in host memory, between micro-batches and until the optimizer's step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import islice

import torch
from torch import Tensor

from hone.checkpoint.sharded import local_part
from hone.trainer.offload import CopyStream, host_tensors, mark_of, wait_for
from hone.trainer.pieces import (
    BUCKET_BYTES,
    Piece,
    accumulation_dtype,
    norm_of_pieces,
    pieces_of,
)

__all__ = ["HostGradients"]


class HostGradients:
    """Adds gradients up on the device, and keeps the sums in pinned host memory between
    micro-batches.

    Each fresh gradient is added to the sum so far, which has been fetched from the host in advance:
    the first micro-batch shows the order in which backward produces gradients. The sums have the
    same bits as those of gradients that stay on the device. Copies in both directions overlap with
    backward, each through a window of device memory; when a window is full, backward waits.
    """

    def __init__(
        self, like: Mapping[str, Tensor], device: torch.device, *, window_bytes: int
    ) -> None:
        """The gradients have the layout of the parameters `like`; of a DTensor, this process's
        part. The window is `window_bytes`, but at least one bucket. A compiled layer produces all
        its gradients at once, and a window of their size lets the next layer go on. Raises
        UserError where the host has too little memory.
        """
        self.device = device
        parts = {name: local_part(tensor) for name, tensor in like.items()}
        layout = [(part.shape, accumulation_dtype(part.dtype)) for part in parts.values()]
        purpose = "trainer.offload gradients keeps float32 gradients on the host"
        self._host = dict(zip(parts, host_tensors(layout, device, purpose=purpose), strict=True))
        self._window = max(window_bytes, BUCKET_BYTES)
        self._norms: dict[str, Tensor] = {}
        self._order: dict[Piece, int] = {}
        """Order in which backward produces pieces."""
        self._arriving, self._going = CopyStream(device), CopyStream(device)
        self._stored: dict[Piece, torch.Event | None] = {}
        self._ahead: dict[Piece, tuple[Tensor, torch.Event | None]] = {}
        self._leaving: deque[tuple[Tensor, torch.Event | None]] = deque()

    @torch.no_grad()
    def add(self, name: str, gradient: Tensor) -> None:
        """Add `gradient`, a tensor on the device, to the parameter's float32 sum. It may be freed
        afterwards."""
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
        """Local float32 sums by parameter, in the order of the parameters. Waits until all copies
        have arrived."""
        self._settle()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return {name: host for name, host in self._host.items() if name in self._norms}

    @property
    def norms(self) -> dict[str, Tensor]:
        """2-norms of the pieces of each gradient (`pieces_of`), [K] on the device."""
        return {name: self._norms[name] for name in self._host if name in self._norms}

    @property
    def num_bytes(self) -> int:
        """Bytes of the sums in host memory."""
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
        """Free the device memory of the oldest copy to the host. Later work, which may get the same
        memory, waits until that copy is complete."""
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
        """Fetch the sums of the pieces that backward produces after `piece`, as many as a window
        has room for."""
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
