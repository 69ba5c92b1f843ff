"""AdamW with bfloat16 moments, rounded stochastically."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from hone.checkpoint.sharded import region_of
from hone.trainer.pieces import Operand
from hone.trainer.settings import OptimizerConfig

__all__ = ["FlatLayout", "NarrowMoments", "adamw_bfloat16_"]

_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Place of a flattened shard in its flattened parameter: element `i` of the shard is element
    `offset + i // row * stride + i % row` of the parameter.

    A shard in one piece, which is what a cut along the first dimension gives, has `row == stride`.
    """

    offset: int = 0
    row: int = 1
    stride: int = 1

    @classmethod
    def of(cls, parameter: Tensor) -> FlatLayout:
        """The layout of this process's shard. Raises ValueError where it is cut along two
        dimensions other than the first."""
        region, shape = region_of(parameter), tuple(parameter.shape)
        if not prod(region.shape):
            return cls()
        offset = sum(o * prod(shape[dim + 1 :]) for dim, o in enumerate(region.offsets))
        cut = [dim for dim, n in enumerate(region.shape) if dim and n != shape[dim]]
        if not cut:
            return cls(offset)
        if len(cut) > 1:
            raise ValueError(f"a shard of {region.shape} of {shape} is cut along dimensions {cut}")
        return cls(offset, prod(region.shape[cut[0] :]), prod(shape[cut[0] :]))


class NarrowMoments:
    """Updates of parameters whose moments are bfloat16."""

    def __init__(self, parameters: Mapping[str, Tensor], cfg: OptimizerConfig) -> None:
        self._cfg = cfg
        self._layouts = {name: FlatLayout.of(p) for name, p in parameters.items()}
        """Seed of the rounding noise of each parameter's moments."""

    def update(self, operand: Operand, num_steps: int, lr: float, decay: float) -> None:
        """Make step `num_steps` of a piece, in place."""
        name, first_index, _ = operand.piece
        adamw_bfloat16_(
            operand.master,
            operand.gradient,
            operand.exp_avg,
            operand.exp_avg_sq,
            first_index=first_index,
            layout=self._layouts[name],
            seed=zlib.crc32(f"{name}/{num_steps}".encode()) >> 1,
            num_steps=num_steps,
            cfg=self._cfg,
            lr=lr,
            decay=decay,
        )


def adamw_bfloat16_(
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    first_index: int,
    layout: FlatLayout = FlatLayout(),
    seed: int,
    num_steps: int,
    cfg: OptimizerConfig,
    lr: float,
    decay: float,
) -> None:
    """Make step `num_steps` (counted from 1) of AdamW in place: float32 master and gradient,
    bfloat16 moments.

    All are flat: elements from `first_index` on of a shard that lies in its parameter as `layout`
    says. The master is updated with the moments before they are rounded. Rounding is stochastic:
    its random bits depend on `seed` and on an element's place in the parameter, so the result is
    the same for every way of sharding. Rounding to the nearest does not work: a moment that should
    change by less than 1/256 of itself would never change, so at a decay of 0.999 it would keep its
    first value for ever.
    """
    beta1, beta2 = cfg.betas
    correction1, correction2 = 1 - beta1**num_steps, 1 - beta2**num_steps
    if master.is_cuda:
        from hone.trainer.adamw_kernel import adamw_bfloat16  # needs triton, absent on CPUs

        adamw_bfloat16(
            master,
            gradient,
            exp_avg.view(torch.int16),
            exp_avg_sq.view(torch.int16),
            first_index=first_index,
            offset=layout.offset,
            row=layout.row,
            stride=layout.stride,
            seed=seed,
            lr=lr,
            decay=decay,
            beta1=beta1,
            beta2=beta2,
            eps=cfg.eps,
            correction1=correction1,
            correction2=correction2,
        )
        return
    for start in range(0, master.numel(), _CHUNK):
        place = slice(start, start + _CHUNK)
        p, g = master[place], gradient[place]
        m = exp_avg[place].float().lerp_(g, 1 - beta1)
        v = exp_avg_sq[place].float().mul_(beta2).addcmul_(g, g, value=1 - beta2)
        p.mul_(1 - lr * decay)
        p.addcdiv_(m, (v.sqrt() / correction2**0.5).add_(cfg.eps), value=-lr / correction1)
        noise = _noise(first_index + start, p.numel(), seed, layout)
        exp_avg[place] = _round_to_bfloat16(m, noise & 0xFFFF)
        exp_avg_sq[place] = _round_to_bfloat16(v, _shift_right(noise, 16))


def _round_to_bfloat16(x: Tensor, noise: Tensor) -> Tensor:
    """Stochastic rounding: adding 16 random bits below the last kept bit carries into it with the
    probability of the fraction that is cut off."""
    return ((x.view(torch.int32) + noise) & -0x10000).view(torch.float32).bfloat16()


def _noise(first_index: int, size: int, seed: int, layout: FlatLayout = FlatLayout()) -> Tensor:
    """32 pseudo-random bits for each place, as int32: the finaliser of MurmurHash3 in wrapping
    arithmetic."""
    i = torch.arange(first_index, first_index + size)
    if layout.row != layout.stride:
        i = i // layout.row * layout.stride + i % layout.row
    x = (layout.offset + i).to(torch.int32)
    x = x * _signed(0x9E3779B1) + seed
    x = (x ^ _shift_right(x, 16)) * _signed(0x85EBCA6B)
    x = (x ^ _shift_right(x, 13)) * _signed(0xC2B2AE35)
    return x ^ _shift_right(x, 16)


def _shift_right(x: Tensor, places: int) -> Tensor:
    """Logical right shift, which fills with zeros."""
    return (x >> places) & ((1 << (32 - places)) - 1)


def _signed(bits: int) -> int:
    return bits - (1 << 32) if bits >= 1 << 31 else bits
