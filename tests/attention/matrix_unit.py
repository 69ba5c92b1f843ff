"""Triton's interpreter with products that round as a matrix unit's do. Import before triton.

The interpreter multiplies tiles with numpy, whose order of additions depends on the tile's shape.
A matrix unit adds 16 products at a time, exactly, to a float32 sum, in every shape.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
from triton.runtime import interpreter

PRODUCTS_PER_STEP = 16

patch_tensor = interpreter._patch_lang_tensor


def patch_loop_bounds(tensor, scope):
    """The interpreter of triton 3.6 calls int() on one-element arrays, which numpy 2.4 refuses."""
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def dot(self, a, b, d, *options):
    """Products of 16-bit floats and their sums of 16 are exact in float64, so in any order."""
    a_64, b_64, total = a.data.astype(np.float64), b.data.astype(np.float64), d.data
    for k in range(0, a_64.shape[1], PRODUCTS_PER_STEP):
        step = a_64[:, k : k + PRODUCTS_PER_STEP] @ b_64[k : k + PRODUCTS_PER_STEP]
        total = (total + step).astype(np.float32)
    return interpreter.TensorHandle(total, d.dtype.scalar)


interpreter._patch_lang_tensor = patch_loop_bounds
interpreter.InterpreterBuilder.create_dot = dot
