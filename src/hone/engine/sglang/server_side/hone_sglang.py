"""The part of hone that runs inside the processes of an SGLang server.

The server may have another Python and other versions of torch and transformers than hone, so this
file imports no other module of hone. It does three things:

- It starts the server, with arguments from a file, since a command line is public and one of them
  is a secret. It ends the server when the process that started it is gone.
- It copies weights out of a buffer that it shares with hone into the parameters of the model.
- It computes the checksums of what these parameters hold (`hone.models.manifest` has the formula).

SGLang calls `load` as a custom weight loader. What to do is in `request.json` of a folder that only
the user of this run can read; the answer goes to `answer.json` there. No pickle is read.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

FOLDER = "HONE_SGLANG_FOLDER"
ROW_WORDS = 16384
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""The layers that SGLang computes in one, and the names that the checkpoint has for their rows."""
_ROWS_AT_A_TIME = 256
_buffers: dict[str, Tensor] = {}


def load(model: Any, named_tensors: Any) -> None:
    """SGLang's entry: do what `request.json` asks. `named_tensors` are empty."""
    answer(model, Path(os.environ[FOLDER]))


@torch.no_grad()
def answer(model: Any, folder: Path) -> None:
    """Read a request out of `folder`, do it, and write the answer. Raises ValueError for weights
    that the model does not have or whose sizes are others."""
    request = json.loads((folder / "request.json").read_text())
    held = dict(weights(model))
    found: dict[str, Any] = {"number": request["number"]}
    if request["call"] == "take":
        take(held, request["pieces"], _buffer(request["buffer"]))
    else:
        found["weights"] = describe(held, has_checksums=request["call"] == "prove")
    whole = folder / "answer.json.tmp"
    whole.write_text(json.dumps(found))
    whole.replace(folder / "answer.json")


def weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every parameter under the name that the checkpoint has for it: views of what kernels read."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        parent, _, last = path.rpartition(".")
        module, tensor = model.get_submodule(path), parameter.detach()
        if last in FUSED:
            for own, view in zip(FUSED[last], tensor.split(list(module.output_sizes)), strict=True):
                yield f"{parent}.{own}.{leaf}", view
        elif hasattr(module, "org_vocab_size"):
            yield name, tensor[: module.org_vocab_size]  # the rows behind them are padding
        else:
            yield name, tensor


def take(held: dict[str, Tensor], pieces: list[dict[str, Any]], buffer: Tensor) -> None:
    """Copy pieces of weights out of the buffer. Each is `count` elements of the flattened weight
    from `start` on, and lies at byte `offset` of the buffer in the format of the weight."""
    for piece in pieces:
        target = held[piece["name"]].view(-1)[piece["start"] :][: piece["count"]]
        source = buffer[piece["offset"] :][: target.nbytes].view(target.dtype)
        if source.numel() != piece["count"]:
            raise ValueError(f"{piece['name']} has no {piece['count']} values at {piece['start']}")
        target.copy_(source)
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)


def describe(held: dict[str, Tensor], *, has_checksums: bool) -> dict[str, Any]:
    """Shape, dtype and ties of each weight, and the checksum of what it holds."""
    records: dict[str, Any] = {}
    owners: dict[tuple[Any, ...], str] = {}
    for name, tensor in held.items():
        owner = owners.setdefault((tensor.data_ptr(), tensor.shape), name)
        records[name] = {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "tied_to": None if owner == name else owner,
            "checksum": 0,
        }
        if has_checksums:
            same = records[owner]["checksum"] if owner != name else checksum(tensor)
            records[name]["checksum"] = same
    return records


def checksum(tensor: Tensor) -> int:
    """The checksum of the bits of a tensor: that of `hone.models.manifest`."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    padding = -flat.numel() % (4 * ROW_WORDS)
    num_rows = -(-flat.numel() // (4 * ROW_WORDS))
    table = torch.from_numpy(
        _mix(np.arange(ROW_WORDS, dtype=np.uint64) + np.uint64(1 << 63)).view(np.int64)
    ).to(tensor.device)
    sums: list[Tensor] = []
    for first in range(0, num_rows, _ROWS_AT_A_TIME):
        part = flat[first * 4 * ROW_WORDS :][: _ROWS_AT_A_TIME * 4 * ROW_WORDS]
        if first + _ROWS_AT_A_TIME >= num_rows and padding:
            part = torch.nn.functional.pad(part, (0, padding))
        elif part.storage_offset() % 4:
            part = part.clone()  # words must begin at words
        rows = part.view(torch.int32).view(-1, ROW_WORDS)
        sums.append((rows.to(torch.int64) * table).sum(1))
    if not sums:
        return 0
    row_sums = torch.cat(sums).cpu().numpy().view(np.uint64)
    mixed = _mix(row_sums + _mix(np.arange(num_rows, dtype=np.uint64)))
    return int(mixed.sum(dtype=np.uint64))


def _mix(x: Any) -> Any:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _buffer(place: dict[str, Any]) -> Tensor:
    """The buffer that hone fills: device memory by its CUDA IPC handle, or a file."""
    key = json.dumps(place, sort_keys=True)
    if key not in _buffers:
        _buffers.clear()
        if "path" in place:
            size = place["num_bytes"]
            _buffers[key] = torch.from_file(
                place["path"], shared=True, size=size, dtype=torch.uint8
            )
        else:
            _buffers[key] = _open_ipc(place)
    return _buffers[key]


def _open_ipc(place: dict[str, Any]) -> Tensor:
    fields = [
        base64.b64decode(value["bytes"]) if isinstance(value, dict) else value
        for value in place["ipc"]
    ]
    device = torch.cuda.current_device()
    kind: Any = torch.UntypedStorage
    storage = kind._new_shared_cuda(device, *fields[1:])
    buffer = torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}")
    return buffer.set_(storage, place["offset"], (place["num_bytes"],), (1,))


def main() -> None:
    """Run the server whose arguments are in the folder, until the starting process is gone."""
    folder = Path(os.environ[FOLDER])
    threading.Thread(target=_end_with_starter, daemon=True).start()
    arguments = json.loads((folder / "arguments.json").read_text())
    run_server = importlib.import_module("sglang.launch_server").run_server
    server_args = importlib.import_module("sglang.srt.server_args")

    try:
        run_server(server_args.prepare_server_args(arguments))
    finally:
        os.killpg(os.getpgid(0), signal.SIGKILL)


def _end_with_starter() -> None:
    """Hone holds the other end of standard input, which closes however hone ends."""
    sys.stdin.buffer.read()
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main()
