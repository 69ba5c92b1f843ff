"""Unpacks 4-bit codes by the kernel in Triton's interpreter, and prints as JSON for which shapes
and formats it gives what plain torch gives. A process of its own, as the interpreter is chosen by
an environment variable that must be set before triton is first imported."""

from __future__ import annotations

import json
import sys

from tests import triton_interpreter  # noqa: F401  # isort: skip

import torch

from hone.models.nf4 import NF4, dequantise, quantise
from hone.models.nf4_kernel import unpack

SHAPES = [(1, 64), (8, 64), (3, 16, 64), (48, 96), (67, 64), (5, 24, 128)]
"""Less than a program unpacks, whole programs, and a last one that is not full."""


def main() -> None:
    equal: dict[str, bool] = {}
    for shape in SHAPES:
        weight = torch.randn(shape)
        weight[..., :1, :] = 0
        codes, scales = quantise(weight)
        for dtype in (torch.float32, torch.float16):
            found = unpack(codes, scales, NF4, dtype).reshape(shape)
            expected = dequantise(codes, scales, shape, dtype)
            equal[f"{shape} {dtype}"] = torch.equal(found, expected)
    json.dump(equal, sys.stdout)


if __name__ == "__main__":
    main()
