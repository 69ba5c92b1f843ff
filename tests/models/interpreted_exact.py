"""Runs the exact matrix product in Triton's interpreter, prints errors and unequal rows as JSON.

A process of its own, as the interpreter is chosen before triton is first imported.
"""

from __future__ import annotations

import json
import sys

from tests.attention import matrix_unit  # noqa: F401  # isort: skip

import torch

from hone.models import exact_kernel
from hone.models.exact_kernel import TILES, matmul

SHAPES = {"even": (128, 256), "odd": (72, 200), "long": (64, 4096)}
NUM_ROWS = 150


def operands(name):
    num_outputs, num_inputs = SHAPES[name]
    draw = torch.Generator().manual_seed(len(name))
    x = torch.randn(NUM_ROWS, num_inputs, generator=draw).half()
    weight = torch.randn(num_outputs, num_inputs, generator=draw).half()
    return x, weight, torch.randn(num_outputs, generator=draw).half()


def error(name):
    x, weight, bias = operands(name)
    expected = x.double() @ weight.double().T
    worst = 0.0
    for b in (None, bias):
        for splits in (None, 2):
            actual = matmul(x, weight, b, splits=splits, dtype=torch.float32)
            exact = expected if b is None else expected + b.double()
            worst = max(worst, ((actual - exact).abs().max() / exact.abs().max()).item())
    return worst


def num_unequal(name):
    """Rows whose bits differ by way of computing them; all at once is the measure."""
    x, weight, bias = operands(name)
    found = {}
    for splits in (None, 2):
        expected = matmul(x, weight, bias, splits=splits, dtype=torch.float32)

        def compare(case, rows, expected=expected, splits=splits, **options):
            # A slice of wider rows, as a projection's output is.
            part = torch.cat([x[rows], x[rows]], 1)[:, : x.shape[1]]
            actual = matmul(part, weight, bias, splits=splits, dtype=torch.float32, **options)
            differs = (actual != expected[rows]).any(1).sum()
            found[f"{case}, splits {splits}"] = int(differs)

        compare("one row", slice(7, 8))
        compare("five rows", slice(70, 75))
        compare("backwards", torch.arange(99, -1, -1))
        for tile in TILES:
            for parallel in (False, True):
                rows = slice(64, 130)
                compare(f"{tile} {parallel}", rows, tile=tile, parallel=parallel)
    return found


def planted_splits():
    """Rows that differ where the parts of K follow from the number of rows."""
    x, weight, _ = operands("long")
    few = matmul(x[:4], weight, splits=4, dtype=torch.float32)
    return int((few != matmul(x, weight, splits=2, dtype=torch.float32)[:4]).any(1).sum())


def main() -> None:
    x, weight, _ = operands("even")
    results = {
        "error": {name: error(name) for name in SHAPES},
        "unequal": {name: num_unequal(name) for name in SHAPES},
        "planted": planted_splits(),
        "dtypes": [str(matmul(x, weight).dtype), list(matmul(x[:0], weight).shape)],
        "splits": exact_kernel.num_splits(8192),
    }
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
