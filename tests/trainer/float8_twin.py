"""Products in float8 with scales of rows, said plainly in float64; and the operator that computes
them on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def power_below(x: Tensor) -> Tensor:
    """The largest power of two that is not above x, float64 and positive, bit by bit: `2.0 ** n`
    may be off by the last bit on a GPU, and then numbers half-way between two of float8 move."""
    return ((x.view(torch.int64) >> 52) << 52).view(torch.float64)


def e4m3(x: Tensor) -> Tensor:
    """The nearest number with three bits of mantissa and an exponent from -6, at most 448; ties to
    even. x is float64."""
    magnitude = x.abs().clamp(max=448.0)
    step = power_below(magnitude.clamp(min=2.0**-6)) / 8
    return x.sign() * (magnitude / step).round() * step


def rounded(x: Tensor, dim: int) -> Tensor:
    """Each row along `dim` in float8, under the largest power of two that keeps it within 448."""
    largest = x.abs().amax(dim, keepdim=True).clamp(min=1e-12)
    scale = power_below(448.0 / largest)
    return e4m3(x * scale) / scale


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] @ b [K, N], scaled along what is summed over."""
    return rounded(a, 1) @ rounded(b, 0)


def projection(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`x weight^T` of x [T, K] and weight [N, K], and the gradients of both under grad [T, N]."""
    x, weight, grad = x.detach().double(), weight.detach().double(), grad.double()
    return product(x, weight.T), product(grad, weight), product(grad.T, x)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    *,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: None,
    scale_result: None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """`torch._scaled_mm`, which not every version has for CPUs; takes what it takes on GPUs."""
    (num_rows, width), (_, num_columns) = a.shape, b.shape
    assert width % 16 == 0, f"{a.shape=}"
    assert num_columns % 16 == 0, f"{b.shape=}"
    assert a.stride() == (width, 1), f"{a.stride()=}: rows are to be contiguous"
    assert b.stride() == (1, width), f"{b.stride()=}: columns are to be contiguous"
    assert torch.float8_e4m3fn in (a.dtype, b.dtype)
    if scale_a.numel() > 1:
        assert scale_a.shape == (num_rows, 1), f"{scale_a.shape=}"
        assert scale_b.shape == (1, num_columns), f"{scale_b.shape=}"
    return ((a.float() @ b.float()) * scale_a * scale_b).to(out_dtype)
