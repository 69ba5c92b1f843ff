"""Convolution and recurrence over the segments of a pass: by the Triton kernels of `fla-core` on
CUDA, else in plain torch.

All segments are convolved at once, since the inputs before each are known. States go from level to
level. Letters: T tokens, S segments, of which the first level has s, C channels, W weights of a
channel, H value heads, K and V sizes of a head.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from hone.attention.recurrent import convolution, delta_rule
from hone.attention.recurrent.delta_rule import Tokens
from hone.extras import is_installed
from hone.segments import BEFORE, SegmentPlan

__all__ = ["convolve", "gated_delta_rule", "has_fla", "inputs_before"]


@lru_cache
def has_fla() -> bool:
    """Whether the package of the kernels is installed (`hone[hybrid]`)."""
    return is_installed("fla") and is_installed("triton")


def _uses_fla(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and has_fla()


def gated_delta_rule(
    tokens: Tokens, plan: SegmentPlan, stored: Tensor | None, *, gives_final: bool
) -> tuple[Tensor, Tensor | None]:
    """Outputs [T, H, V] of the gated delta rule, and final states [S, H, K, V], which may be None
    unless `gives_final`. `stored` are the initial states [s, H, K, V] of the first level, of a plan
    that reads some; None: zeros. Differentiable."""
    assert len(tokens.v) == sum(plan.lengths), f"{tokens.v.shape=} {plan.lengths=}"
    if _uses_fla(tokens.v):
        from hone.attention.recurrent import fla_rule  # needs fla and triton

        return fla_rule.gated_delta_rule(tokens, plan, stored, gives_final=gives_final)
    sizes = [sum(level.lengths) for level in plan.levels]
    parts = zip(*(x.split(sizes) for x in tokens), strict=True)
    outputs: list[Tensor] = []
    finals: list[Tensor] = []
    initial = stored
    for level, part in zip(plan.levels, parts, strict=True):
        if level.parents is not None:
            initial = torch.cat(finals)[level.parents]
        output, final = delta_rule.chunked(Tokens(*part), level.lengths, initial)
        outputs.append(output)
        finals.append(final)
    if len(plan.levels) == 1:
        return outputs[0], finals[0]
    return torch.cat(outputs), torch.cat(finals) if gives_final else None


def convolve(
    x: Tensor, weight: Tensor, plan: SegmentPlan, stored: Tensor | None, *, gives_final: bool
) -> tuple[Tensor, Tensor | None]:
    """Outputs [T, C] of the causal convolution of x [T, C] with weight [C, W], and the last inputs
    [S, W - 1, C] of segments, which may be None unless `gives_final`. `stored` are the inputs
    [s, W - 1, C] before the segments of the first level, of a plan that reads some; None: zeros.
    Differentiable in x and weight."""
    assert len(x) == sum(plan.lengths), f"{x.shape=} {plan.lengths=}"
    if _uses_fla(x):
        from hone.attention.recurrent import fla_convolution  # needs fla and triton

        before = inputs_before(x.detach(), weight.shape[1] - 1, plan, stored)
        return fla_convolution.convolve(x, weight, plan, before, gives_final=gives_final)
    before = inputs_before(x, weight.shape[1] - 1, plan, stored)
    return convolution.convolve(x, weight, plan.lengths, before)


def inputs_before(
    x: Tensor, window: int, plan: SegmentPlan, stored: Tensor | None
) -> Tensor | None:
    """The `window` inputs [S, window, C] before each segment of x [T, C]; None: zeros.
    Differentiable in x. `stored` [s, window, C] are those before the segments of the first level,
    of a plan that reads some; None: zeros."""
    assert window <= BEFORE, f"{window=} {BEFORE=}"
    assert stored is None or plan.before_reads is not None, "the plan reads no stored inputs"
    if plan.before is None and stored is None:
        return None
    found = x.new_zeros(len(plan.lengths) * BEFORE, x.shape[1])
    if plan.before is not None:
        numbers, places = plan.before
        found = found.index_copy(0, numbers, x[places])
    if plan.before_reads is not None and stored is not None:
        numbers, places = plan.before_reads
        padded = stored.new_zeros(len(stored), BEFORE, x.shape[1])
        padded[:, BEFORE - window :] = stored
        found = found.index_copy(0, numbers, padded.flatten(0, 1)[places].to(x.dtype))
    return found.unflatten(0, (-1, BEFORE))[:, BEFORE - window :]
