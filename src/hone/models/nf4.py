"""4-bit NormalFloat: weights as codes in blocks of 64 values with one scale each (Dettmers et al.,
arXiv:2305.14314).

A stack of matrices [E, out, in], as of a layer's experts, has the codes of each matrix behind those
of the one before. Where no kernel unpacks it, it is computed with in parts, so that little of it is
in float32 at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hone.families.model_facts import NF4_BLOCK

__all__ = [
    "NF4",
    "dequantise",
    "parts",
    "quantise",
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

_TOGETHER = 16
"""Matrices of a stack that are merged, and without a kernel unpacked, in float32 at once. All of
them would be twice as large as in the format that computes, and several times while unpacked."""


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a matrix or a stack of them to codes [numel / 2] uint8, two per byte, the first in
    the upper half, and the largest magnitude of each block, [numel / NF4_BLOCK] float32. Raises
    ValueError if the number of values of a matrix is no multiple of a block."""
    size = weight.shape[-2:]
    if size.numel() % NF4_BLOCK:
        raise ValueError(f"{tuple(size)} is no whole number of blocks of {NF4_BLOCK}")
    codes, scales = zip(*map(_pack, parts(weight)), strict=True)
    return torch.cat(codes), torch.cat(scales)


def _pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    blocks = weight.detach().float().reshape(-1, NF4_BLOCK)
    scales = blocks.abs().amax(1)
    levels = torch.tensor(NF4, device=weight.device)
    borders = (levels[1:] + levels[:-1]) / 2
    shares = blocks / torch.where(scales == 0, 1.0, scales)[:, None]
    codes = torch.bucketize(shares, borders, out_int32=True).to(torch.uint8).reshape(-1, 2)
    return codes[:, 0] << 4 | codes[:, 1], scales


def dequantise(codes: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The matrix or the stack that `quantise` stored."""
    if len(shape) == 2 or codes.is_cuda:
        return _unpack(codes, scales, shape, dtype)
    whole = torch.empty(shape, dtype=dtype, device=codes.device)
    for own, part in zip(parts(whole), unpacked_parts(codes, scales, shape, dtype), strict=True):
        own.copy_(part)
    return whole


def unpacked_parts(
    codes: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> Iterator[Tensor]:
    """The `parts` of what `quantise` stored of this shape, one after the other."""
    packed = (parts(x.view(*shape[:-2], 1, -1)) for x in (codes, scales))
    for own_codes, own_scales in zip(*packed, strict=True):
        yield _unpack(own_codes, own_scales, (*own_codes.shape[:-2], *shape[-2:]), dtype)


def _unpack(codes: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if codes.is_cuda:
        from hone.models.nf4_kernel import unpack  # needs triton, absent on CPUs

        return unpack(codes.contiguous(), scales.contiguous(), NF4, dtype).reshape(shape)
    levels = torch.tensor(NF4, device=codes.device)
    halves = torch.stack([codes >> 4, codes & 15], dim=-1).reshape(-1, NF4_BLOCK)
    return (levels[halves.int()] * scales.reshape(-1, 1)).to(dtype).reshape(shape)


def parts(weight: Tensor) -> Sequence[Tensor]:
    """What is computed with at a time: neighbours in a stack of matrices, or all of one matrix."""
    return weight.split(_TOGETHER) if weight.ndim == 3 else (weight,)
