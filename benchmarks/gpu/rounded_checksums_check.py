"""Checksums of what masters round to, on a GPU: those of the rounded weights, and what they cost.

    python -m benchmarks.gpu.rounded_checksums_check [--dry]

Masters of the shapes of Qwen3-1.7B, whole and in the pieces of a step; prints the milliseconds of
both and exits with 1 where a checksum differs. `--dry` takes small ones on a CPU.
"""

from __future__ import annotations

import sys
from time import perf_counter

import torch
from torch import Tensor

from hone.models.manifest import RoundedChecksums, build_manifest

PIECE = 1024 * 10_000


def masters(device: torch.device, width: int, num_layers: int) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(width, width), (3 * width, width), (width,), (width + 1,)]
    return {
        f"{layer}.{i}": torch.randn(shape, generator=generator, device=device) / 8
        for layer in range(num_layers)
        for i, shape in enumerate(shapes)
    }


def timed(values: dict[str, Tensor], size: int | None) -> tuple[dict[str, int], float]:
    """Checksums, and the second round's seconds; in pieces of `size`, or in one call."""
    checksums = RoundedChecksums()
    seconds = 0.0
    for _ in range(2):
        start = perf_counter()
        if size is None:
            checksums.add([(n, 0, v.view(-1)) for n, v in values.items()], torch.bfloat16)
        for name, value in values.items() if size is not None else ():
            for begin in range(0, value.numel(), size or 1):
                piece = value.view(-1)[begin : begin + (size or 1)]
                checksums.add([(name, begin, piece)], torch.bfloat16)
        found = checksums.values()
        seconds = perf_counter() - start
    return found, seconds


def main() -> int:
    is_dry = "--dry" in sys.argv
    device = torch.device("cpu" if is_dry else "cuda")
    values = masters(device, *((64, 2) if is_dry else (4096, 25)))
    weights = {name: value.bfloat16() for name, value in values.items()}
    expected = {n: r.checksum for n, r in build_manifest(weights.items(), 0).tensors.items()}
    num_bytes = sum(value.nbytes for value in values.values())
    is_right = True
    for name, size in (("one call", None), ("pieces", 2048 if is_dry else PIECE)):
        found, seconds = timed(values, size)
        is_right &= found == expected
        speed = f"{1e3 * seconds:.1f} ms for {num_bytes / 1e9:.1f} GB"
        sys.stdout.write(f"{name}: {speed}, {'right' if found == expected else 'wrong'}\n")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
