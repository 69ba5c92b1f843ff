"""4-bit NormalFloat: weights as codes in blocks of 64 values with one scale each (Dettmers et al.,
arXiv:2305.14314).

A stack of matrices [E, out, in], as of a layer's experts, has the codes of each matrix behind those
of the one before, and is computed with in parts, so that little of it is in float32 at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hone.families.model_facts import NF4_BLOCK, STACKED_TOGETHER

__all__ = [
    "NF4",
    "dequantise",
    "dequantise_stacked",
    "quantise",
    "quantise_stacked",
    "unpacked_parts",
]

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The levels: quantiles of a normal distribution, scaled to [-1, 1], with an exact zero (QLoRA,
appendix E)."""


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a weight to codes [numel / 2] uint8, two per byte, the first in the upper half, and
    the largest magnitude of each block, [numel / NF4_BLOCK] float32. Raises ValueError if the
    number of values is no multiple of a block."""
    if weight.numel() % NF4_BLOCK:
        raise ValueError(f"{tuple(weight.shape)} is no whole number of blocks of {NF4_BLOCK}")
    blocks = weight.detach().float().reshape(-1, NF4_BLOCK)
    scales = blocks.abs().amax(1)
    levels = torch.tensor(NF4, device=weight.device)
    borders = (levels[1:] + levels[:-1]) / 2
    shares = blocks / torch.where(scales == 0, 1.0, scales)[:, None]
    codes = torch.bucketize(shares, borders, out_int32=True).to(torch.uint8).reshape(-1, 2)
    return codes[:, 0] << 4 | codes[:, 1], scales


def dequantise(codes: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The weight that `quantise` stored."""
    levels = torch.tensor(NF4, device=codes.device)
    halves = torch.stack([codes >> 4, codes & 15], dim=-1).reshape(-1, NF4_BLOCK)
    return (levels[halves.int()] * scales[:, None]).to(dtype).reshape(shape)


def quantise_stacked(weight_EOI: Tensor) -> tuple[Tensor, Tensor]:
    """`quantise` of a stack. Raises ValueError if the values of a matrix are no whole blocks."""
    if weight_EOI[0].numel() % NF4_BLOCK:
        raise ValueError(f"{tuple(weight_EOI[0].shape)} is no whole number of blocks")
    codes, scales = zip(*map(quantise, weight_EOI.split(STACKED_TOGETHER)), strict=True)
    return torch.cat(codes), torch.cat(scales)


def unpacked_parts(
    codes: Tensor, scales: Tensor, shape: tuple[int, int, int], dtype: torch.dtype
) -> Iterator[Tensor]:
    """Neighbouring matrices [STACKED_TOGETHER or less, out, in] of a stack of this shape that
    `quantise_stacked` stored, one part after the other."""
    number, *size = shape
    parts = (x.view(number, -1).split(STACKED_TOGETHER) for x in (codes, scales))
    for own_codes, own_scales in zip(*parts, strict=True):
        yield dequantise(own_codes.flatten(), own_scales.flatten(), (len(own_codes), *size), dtype)


def dequantise_stacked(
    codes: Tensor, scales: Tensor, shape: tuple[int, int, int], dtype: torch.dtype
) -> Tensor:
    """The stack [E, out, in] that `quantise_stacked` stored."""
    whole = torch.empty(shape, dtype=dtype, device=codes.device)
    for own, part in zip(
        whole.split(STACKED_TOGETHER), unpacked_parts(codes, scales, shape, dtype), strict=True
    ):
        own.copy_(part)
    return whole
