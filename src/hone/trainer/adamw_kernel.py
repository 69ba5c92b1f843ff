"""AdamW with bfloat16 moments on CUDA, in one pass over masters, gradients and moments. Needs
triton."""
# A kernel launch takes `num_warps`, which triton's type hints do not know.
# pyright: reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["adamw_bfloat16"]

_BLOCK = 1024


def adamw_bfloat16(
    master: Tensor,
    gradient: Tensor,
    exp_avg_bits: Tensor,
    exp_avg_sq_bits: Tensor,
    *,
    first_index: int,
    offset: int = 0,
    row: int = 1,
    stride: int = 1,
    seed: int,
    lr: float,
    decay: float,
    beta1: float,
    beta2: float,
    eps: float,
    correction1: float,
    correction2: float,
) -> None:
    """Triton version of `hone.trainer.narrow_moments.adamw_bfloat16_`: flat tensors, moments as
    int16 bits. `offset`, `row` and `stride` are those of `FlatLayout`."""
    size = master.numel()
    if size == 0:
        return
    _adamw_kernel[(triton.cdiv(size, _BLOCK),)](
        master,
        gradient,
        exp_avg_bits,
        exp_avg_sq_bits,
        size,
        first_index,
        offset,
        row,
        stride,
        seed,
        1 - lr * decay,
        lr / correction1,
        beta1,
        beta2,
        eps,
        correction2**0.5,
        IN_ONE_PIECE=row == stride,
        BLOCK=_BLOCK,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["size", "first_index", "offset", "row", "stride", "seed"])
def _adamw_kernel(  # noqa: PLR0917
    master: tl.tensor,
    gradient: tl.tensor,
    exp_avg_bits: tl.tensor,
    exp_avg_sq_bits: tl.tensor,
    size: tl.tensor,
    first_index: tl.tensor,
    offset: tl.tensor,
    row: tl.tensor,
    stride: tl.tensor,
    seed: tl.tensor,
    shrink: tl.tensor,
    step_size: tl.tensor,
    beta1: tl.tensor,
    beta2: tl.tensor,
    eps: tl.tensor,
    root_correction2: tl.tensor,
    IN_ONE_PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = start + tl.arange(0, BLOCK)
    mask = i < size
    p = tl.load(master + i, mask=mask)
    g = tl.load(gradient + i, mask=mask)
    m = _widened(tl.load(exp_avg_bits + i, mask=mask))
    v = _widened(tl.load(exp_avg_sq_bits + i, mask=mask))
    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    p = p * shrink - step_size * m / (tl.sqrt_rn(v) / root_correction2 + eps)
    if IN_ONE_PIECE:
        place = first_index + i
    else:
        # Only the block's start is divided in 64 bits. A 64-bit division for every element would
        # take longer than the memory traffic.
        first = first_index + start
        column = (first % row).to(tl.int32) + tl.arange(0, BLOCK)
        place = (first // row + column // row) * stride + column % row
    noise = _noise((offset + place).to(tl.uint32), seed)
    tl.store(master + i, p, mask=mask)
    tl.store(exp_avg_bits + i, _rounded(m, noise & 0xFFFF), mask=mask)
    tl.store(exp_avg_sq_bits + i, _rounded(v, noise >> 16), mask=mask)


@triton.jit
def _widened(bits: tl.tensor) -> tl.tensor:
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(x: tl.tensor, noise: tl.tensor) -> tl.tensor:
    """Stochastic rounding: adding 16 random bits below the last kept bit carries into it with the
    probability of the fraction that is cut off."""
    return ((x.to(tl.uint32, bitcast=True) + noise) >> 16).to(tl.int16)


@triton.jit
def _noise(index: tl.tensor, seed: tl.tensor) -> tl.tensor:
    """32 pseudo-random bits from index and seed, by the finaliser of MurmurHash3."""
    x = index * 0x9E3779B1 + seed.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)
