"""The weights of an SGLang server: a buffer shared by both processes, and the server's reports on
its parameters.

`server_side/hone_sglang.py` is the other end.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hone.engine.base import deliver
from hone.engine.sglang.server import LOADER, Server
from hone.types import TensorRecord, WeightManifest

__all__ = ["RemoteWeights"]

BUFFER_BYTES = 1 << 27
_ALIGNMENT = 16
_NO_TENSORS = base64.b64encode(b"\x80\x04]\x94.").decode()
"""An empty list, as SGLang wants to have tensors: ours do not go over HTTP."""


class RemoteWeights:
    """The weights of a server on the same host.

    `targets` are tensors on the meta device, one object for tied names.
    """

    def __init__(self, server: Server, device: torch.device, *, size: int = BUFFER_BYTES) -> None:
        self._server, self._device, self._size = server, device, size
        self._number = 0
        self._buffer: Tensor | None = None
        self._place: dict[str, Any] = {}
        self.targets: dict[str, Tensor] = {}
        for name, record in self._records("describe").items():
            dtype: torch.dtype = getattr(torch, record.dtype)
            self.targets[name] = (
                self.targets[record.tied_to]
                if record.tied_to is not None
                else torch.empty(record.shape, dtype=dtype, device="meta")
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters; tied ones count once."""
        return sum({id(tensor): tensor.nbytes for tensor in self.targets.values()}.values())

    def write(self, parts: Mapping[str, tuple[Tensor, Tensor]]) -> int:
        """Copy parts, each (target, source), into the server's parameters; return the bytes."""
        num_bytes = 0
        pieces: list[dict[str, Any]] = []
        pairs: list[tuple[Tensor, Tensor]] = []
        offset = 0
        for name, target, start, source in _cut(parts, self._size):
            length = source.numel() * target.dtype.itemsize
            if offset + length > self._size:
                self._send(pieces, pairs)
                pieces, pairs, offset = [], [], 0
            view = self._memory()[offset:][:length].view(target.dtype)
            pairs.append((view, source))
            pieces.append({"name": name, "start": start, "count": source.numel(), "offset": offset})
            offset += -(-length // _ALIGNMENT) * _ALIGNMENT
            num_bytes += length
        self._send(pieces, pairs)
        return num_bytes

    def held(self, version: int) -> WeightManifest:
        """Manifest of the server's current parameters. From then on the server reports `version`,
        and has no keys and values of other weights."""
        records = self._records("prove", flush_cache=True, weight_version=str(version))
        return WeightManifest(version, records)

    def _send(self, pieces: list[dict[str, Any]], pairs: list[tuple[Tensor, Tensor]]) -> None:
        if not pieces:
            return
        deliver(pairs)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the server reads on a stream of its own
        self._ask("take", {"pieces": pieces, "buffer": self._place})

    def _records(self, call: str, **fields: Any) -> dict[str, TensorRecord]:
        found = self._ask(call, {}, **fields)["weights"]
        return {
            name: TensorRecord(tuple(r["shape"]), r["dtype"], r["checksum"], r["tied_to"])
            for name, r in found.items()
        }

    def _ask(self, call: str, request: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        """Run a request in the server's weight loader. Raises RuntimeError where it was not run."""
        self._number += 1
        folder = self._server.folder
        content = json.dumps({"call": call, "number": self._number, **request})
        (folder / "request.json").write_text(content)
        body = {"serialized_named_tensors": [_NO_TENSORS], "load_format": LOADER}
        self._server.call("/update_weights_from_tensor", body | {"flush_cache": False, **fields})
        answer = folder / "answer.json"
        found: dict[str, Any] = json.loads(answer.read_text()) if answer.is_file() else {}
        if found.get("number") != self._number:
            raise RuntimeError(
                f"the SGLang server did not run {LOADER} for the request {call!r}, and says it did"
            )
        return found

    def _memory(self) -> Tensor:
        """The buffer, [size] uint8, created at its first use."""
        if self._buffer is None:
            if self._device.type == "cuda":
                self._buffer = torch.empty(self._size, dtype=torch.uint8, device=self._device)
                self._place = _ipc_place(self._buffer)
            else:
                path = str(self._server.folder / "buffer")
                self._buffer = torch.from_file(
                    path, shared=True, size=self._size, dtype=torch.uint8
                )
                self._place = {"path": path, "num_bytes": self._size}
        return self._buffer


def _cut(
    parts: Mapping[str, tuple[Tensor, Tensor]], size: int
) -> Iterator[tuple[str, Tensor, int, Tensor]]:
    """Name, target, first element and a flat piece of the source that fits into `size` bytes."""
    for name, (target, source) in parts.items():
        count = size // target.dtype.itemsize
        flat = source.detach().reshape(-1)
        for start in range(0, flat.numel(), count):
            yield name, target, start, flat[start : start + count]


def _ipc_place(buffer: Tensor) -> dict[str, Any]:
    """The CUDA IPC handle by which another process on the same GPU opens this memory."""
    shared: Any = buffer.untyped_storage()
    fields = shared._share_cuda_()
    return {
        "ipc": [
            {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value
            for value in fields
        ],
        "offset": buffer.storage_offset(),
        "num_bytes": buffer.numel(),
    }
