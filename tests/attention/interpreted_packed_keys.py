"""Runs the kernels of `hone.attention.packed_keys_kernels` in Triton's interpreter on the CPU, and
prints what they do as JSON. A process of its own, see `tests.attention.interpreted_kernels`."""

from __future__ import annotations

import json
import sys

from tests import stand_in_for_transformers  # noqa: F401  # isort: skip
from tests.triton_interpreter import interpreter  # isort: skip  # noqa: F401

import torch

from hone.attention.packed_keys_kernels import gather, sum_uses
from tests.attention.keys import branching


def main() -> None:
    copied: list[bool] = []
    errors: list[float] = []
    planted, by_heads = 0.0, True
    for heads, width in ((2, 8), (3, 8), (1, 24), (40, 128)):
        context = branching(num_branches=5)
        keys = context.keys
        assert keys is not None
        # As a layer has them: heads of all tokens one after the other.
        k = torch.randn(heads, context.num_tokens, width).transpose(0, 1)
        v = torch.randn(context.num_tokens, heads, width)
        found = gather(k, v, keys.index)
        copied.append(all(map(torch.equal, found, (k[keys.index], v[keys.index]))))
        num_keys = len(keys.index)
        grads = [
            torch.randn(heads, num_keys, width).transpose(0, 1),  # as flash4 has them
            torch.randn(num_keys, heads, width),
        ]
        sums = sum_uses(*grads, keys.uses, keys.uses_starts)
        by_heads = by_heads and all(x.transpose(0, 1).is_contiguous() for x in sums)
        for total, grad in zip(sums, grads, strict=True):
            exact = torch.zeros(context.num_tokens, heads, width, dtype=torch.float64)
            exact.index_add_(0, keys.index, grad.double())
            errors.append(float((total - exact).abs().max()))
            wrong = exact.clone()
            wrong[0] -= grad[0]  # a use is left out
            planted = max(planted, float((total - wrong).abs().max()))
    found = {
        "cases": len(copied),
        "copied": copied,
        "errors": errors,
        "planted": planted,
        "by_heads": by_heads,
    }
    json.dump(found, sys.stdout)


main()
