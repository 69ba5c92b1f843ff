"""Choice of the implementation: the Triton kernels of `fla-core` on CUDA, else plain torch."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from hone.attention.recurrent import convolution, delta_rule
from hone.attention.recurrent.delta_rule import Tokens
from hone.extras import is_installed
from hone.segments import SegmentLevel

__all__ = ["convolve", "gated_delta_rule", "has_fla"]


@lru_cache
def has_fla() -> bool:
    """Whether the package of the kernels is installed (`hone[hybrid]`)."""
    return is_installed("fla") and is_installed("triton")


def _uses_fla(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and has_fla()


def gated_delta_rule(
    tokens: Tokens, level: SegmentLevel, initial: Tensor | None, *, gives_final: bool
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule over the segments of a level, as `delta_rule.chunked`; final states may
    be None unless `gives_final`."""
    if not _uses_fla(tokens.v):
        return delta_rule.chunked(tokens, level.lengths, initial)
    from hone.attention.recurrent import fla_rule  # needs fla and triton

    return fla_rule.gated_delta_rule(tokens, level, initial, gives_final=gives_final)


def convolve(
    x: Tensor, weight: Tensor, level: SegmentLevel, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The causal convolution over the segments of a level, as `convolution.convolve`."""
    if _uses_fla(x):
        from hone.attention.recurrent import fla_convolution  # needs fla and triton

        return fla_convolution.convolve(x, weight, level, initial)
    return convolution.convolve(x, weight, level.lengths, initial)
