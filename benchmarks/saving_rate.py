"""How fast a checkpoint's files are written, beside a plain write and what hone did before.

    python -m benchmarks.saving_rate --folder /somewhere/with/room --gib 2

Each line has seconds per GB (1e9 bytes) of one file of float32 tensors, flushed to disk: the
median of several rounds, in which the ways take turns.

* *plain*: `write` in pieces of 4 MiB from memory, then `fsync`. It has no checksum.
* *hone*: `hone.checkpoint.atomic.write_tensors`, with a checksum of what was written.
* *safetensors*: `save_file`, `fsync`, and the file read again for its checksum.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from hone.checkpoint.atomic import record_file, write_tensors

PIECE = 1 << 22


def write_plainly(path: Path, tensors: Mapping[str, Tensor]) -> None:
    with path.open("wb", buffering=0) as file:
        for tensor in tensors.values():
            content = tensor.flatten().view(torch.uint8).numpy().data
            for start in range(0, len(content), PIECE):
                file.write(content[start : start + PIECE])
        os.fsync(file.fileno())


def write_by_hone(path: Path, tensors: Mapping[str, Tensor]) -> None:
    write_tensors(path, tensors, {})


def write_by_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file(dict(tensors), path)
    record_file(path)


WAYS: dict[str, Callable[[Path, Mapping[str, Tensor]], None]] = {
    "plain": write_plainly,
    "hone": write_by_hone,
    "safetensors": write_by_safetensors,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    num_tensors = max(1, int(args.gib * 16))
    tensors = {f"weight.{n}": torch.randn(1 << 12, 1 << 12) for n in range(num_tensors)}
    num_gb = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
    path = args.folder / "saving_rate.safetensors"
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(args.rounds):
        for name, write in WAYS.items():
            os.sync()
            start = time.perf_counter()
            write(path, tensors)
            seconds[name].append(time.perf_counter() - start)
            path.unlink()
    plain = statistics.median(seconds["plain"])
    for name, each in seconds.items():
        median = statistics.median(each)
        spread = f"{min(each) / num_gb:.2f} to {max(each) / num_gb:.2f}"
        share = f"{median / plain:.2f} of a plain write"
        print(f"{name:12}{median / num_gb:6.2f} s/GB ({spread})   {share}")


if __name__ == "__main__":
    main()
