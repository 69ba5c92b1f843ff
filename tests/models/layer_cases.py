"""Shapes that the layer kernels are tested with, as arguments and options of their checks."""

from __future__ import annotations

DTYPES = {"float32": (4.0, 1.0), "float16": (2.0, 0.01)}
"""Units of the last place that a value may be off, and the share of values that may differ.

In float32 sums in another order differ in most values. In float16 they move a rounding now and
then; a rounding left out moves many."""

NORM_CASES = {
    "norm": ((5, 1024), {}),
    "norm of one row": ((1, 64), {}),
    "norm of odd width": ((3, 96), {}),
    "norm of a narrow row": ((5, 40), {}),
}
NORM_CASES["norm of a sum of 3 parts"] = ((5, 96), {"parts": 3})
ROTATE_CASES = {
    "heads": (([7, -1, 0, 5, 2], 8, 4, 64), {"norms": True}),
    "heads without norm": (([7, 3, -1], 4, 4, 16), {"norms": False}),
    "heads without cache": (([1, 2, 0], 4, 2, 32), {"norms": True, "cached": False}),
    "one key head, six queries": (([4, 9], 6, 1, 128), {"norms": True}),
    "head of 80": (([4, 9], 3, 3, 80), {"norms": True}),
    "group of 4": (([-1, 9, 0], 8, 2, 32), {"norms": False}),
}
ROTATE_CASES["FP8 cache"] = (([3, -1, 0, 9], 6, 3, 64), {"norms": True, "fp8": True})
PRODUCT_CASES = {
    "few rows": ((3, 128, 256, (16, 32, 64, 1, 4, 2)), {}),
    "several tiles of rows": ((37, 64, 128, (16, 16, 32, 1, 4, 2)), {}),
    "bias": ((5, 64, 64, (16, 32, 64, 1, 4, 2)), {"bias": True}),
    "split in 3": ((9, 64, 384, (16, 32, 64, 3, 4, 2)), {"split": True}),
    "gated": ((20, 192, 128, (16, 32, 64, 1, 4, 2)), {"gated": True}),
}
SILU_CASES = {
    "silu": ((3, 1500), {}),
    "silu of a narrow row": ((2, 24), {}),
}
