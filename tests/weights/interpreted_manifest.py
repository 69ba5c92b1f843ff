"""Runs the kernels of weight manifests in Triton's interpreter, beside the sums in numpy, and
prints how many rows differ as JSON. A process of its own, as the interpreter is chosen by an
environment variable that must be set before triton is first imported."""

from __future__ import annotations

import json
import sys

from tests import triton_interpreter  # noqa: F401  # isort: skip

import torch
from torch import Tensor

from hone.models import manifest
from hone.models.manifest_kernel import rounded_row_sums, row_sums

WIDTH = 4096
"""Words of a row here: shorter than in use, two turns of the kernel."""
SIZES = [1, 2, 7, 2 * WIDTH - 1, 2 * WIDTH, 2 * WIDTH + 2, 5 * WIDTH + 3]
COLUMNS = [0, 1, WIDTH - 2, 0, WIDTH - 1, 5, 2048]


def masters() -> list[Tensor]:
    """Of all exponents and both signs, with ties among them and some at the border of overflow."""
    generator = torch.Generator().manual_seed(0)
    bits = [torch.randint(-(2**31), 2**31, (n,), generator=generator) for n in SIZES]
    for own in bits:
        own[::3] = own[::3] & -0x10000 | 0x8000
    found = [own.to(torch.int32).view(torch.float32) for own in bits]
    return [torch.where(own.isfinite(), own, torch.zeros(())) for own in found]


def main() -> None:
    manifest.ROW_WORDS = WIDTH
    table = manifest._table(torch.device("cpu"))
    assert len(table) == WIDTH
    values = masters()
    weights = [manifest._words(own.bfloat16()) for own in values]
    padded = [torch.nn.functional.pad(w, (c, 0)) for w, c in zip(weights, COLUMNS, strict=True)]
    expected = manifest._row_sums(padded)
    late = [column + 1 for column in COLUMNS]
    truncated = [(own.view(torch.int32) & -0x10000).view(torch.float32) for own in values]
    found = {
        "words": row_sums(padded, table),
        "rounded": rounded_row_sums(values, COLUMNS, table),
        "planted: other columns": rounded_row_sums(values, late, table),
        "planted: truncated": rounded_row_sums(truncated, COLUMNS, table),
    }
    different = {
        name: len(sums) != len(expected) or int((sums != expected).sum())
        for name, sums in found.items()
    }
    sys.stdout.write(json.dumps(different))


if __name__ == "__main__":
    main()
