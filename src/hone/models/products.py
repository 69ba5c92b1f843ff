"""Products with frozen matrices: one for each expert of a layer, and those stored in 4 bits.

Letters: R rows (a token's state for one of its experts), E experts, I inputs and O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.models.nf4 import dequantise

__all__ = ["grouped_product", "nf4_product"]

_eager_grouped_mm = cast("Callable[..., Tensor]", torch.compiler.disable(F.grouped_mm))
"""The operator for other formats than bfloat16, which a compiled layer does not have."""


def grouped_product(rows_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Products [R, O] of rows that are sorted by expert with the matrices of their experts. The
    rows of expert e end before `ends_E[e]`, int32; there may be none."""
    multiply = F.grouped_mm if rows_RI.dtype == torch.bfloat16 else _eager_grouped_mm
    return multiply(rows_RI, weight_EOI.transpose(1, 2), offs=ends_E)


def nf4_product(
    x: Tensor, codes: Tensor, scales: Tensor, shape: Sequence[int], ends_E: Tensor | None = None
) -> Tensor:
    """`x W^T` with a frozen matrix of this shape [O, I], as `nf4.quantise` stored it, or with
    `ends_E` a `grouped_product` with a stack of them, [E, O, I]. The matrix is unpacked for the
    product, and once more in backward. The result has the dtype of x; autocast is not served."""
    return _product(x, codes, scales, shape, ends_E, False)


# One operator, into which a compiler does not look. Else it takes the unpacking in forward and in
# backward for the same value, and keeps the unpacked matrix of every layer from one to the other.
@torch.library.custom_op(
    "hone::nf4_product",
    mutates_args=(),
    schema="(Tensor x, Tensor codes, Tensor scales, int[] shape, Tensor? ends, bool transposed)"
    " -> Tensor",
)
def _product(  # noqa: PLR0917  # an operator takes its arguments by position
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    shape: Sequence[int],
    ends: Tensor | None,
    transposed: bool,
) -> Tensor:
    """`x W^T`, transposed `x W`."""
    weight = dequantise(codes, scales, tuple(shape), x.dtype)
    if transposed:
        weight = weight.transpose(-1, -2)
    return F.linear(x, weight) if ends is None else F.grouped_mm(x, weight.mT, offs=ends)


@_product.register_fake
def _(x: Tensor, codes: Tensor, scales: Tensor, shape: Sequence[int], *others: Any) -> Tensor:
    transposed = others[-1]
    return x.new_empty(*x.shape[:-1], shape[-1] if transposed else shape[-2])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, codes, scales, ctx.shape, ends, ctx.transposed = inputs
    ctx.save_for_backward(codes, scales, ends)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
    codes, scales, ends = ctx.saved_tensors
    if ends is not None:  # grouped products refuse a gradient that is expanded
        grad = grad.contiguous()
    own = _product(grad, codes, scales, ctx.shape, ends, not ctx.transposed)
    return own, None, None, None, None, None


_product.register_autograd(_differentiate, setup_context=_save)
