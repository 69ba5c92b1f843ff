"""Triton's interpreter with products that round as a matrix unit's do. Import before triton.

The interpreter multiplies tiles with numpy, whose order of additions depends on the tile's shape.
A matrix unit adds 16 products at a time, exactly, to a float32 sum, in every shape.
"""

from __future__ import annotations

import numpy as np

from tests.triton_interpreter import interpreter

PRODUCTS_PER_STEP = 16


def dot(self, a, b, d, *options):
    """Products of 16-bit floats and their sums of 16 are exact in float64, so in any order."""
    a_64, b_64, total = a.data.astype(np.float64), b.data.astype(np.float64), d.data
    for k in range(0, a_64.shape[1], PRODUCTS_PER_STEP):
        step = a_64[:, k : k + PRODUCTS_PER_STEP] @ b_64[k : k + PRODUCTS_PER_STEP]
        total = (total + step).astype(np.float32)
    return interpreter.TensorHandle(total, d.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = dot
