# pyright: reportMissingImports=false
"""The causal convolution by the kernels of `fla-core` 0.6, with gradients.

Letters: T tokens, S segments, C channels, W weights of a channel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from fla.modules.causal_conv1d.ops import causal_conv1d_bwd, causal_conv1d_fwd
from torch import Tensor

from hone.segments import BEFORE, SegmentPlan

__all__ = ["convolve"]


def convolve(
    x: Tensor, weight: Tensor, plan: SegmentPlan, before: Tensor | None, *, gives_final: bool
) -> tuple[Tensor, Tensor | None]:
    """Outputs [T, C] of all segments, and the last inputs [S, W - 1, C] of each, None unless
    `gives_final`. `before` [S, W - 1, C] are the inputs before each; None: zeros. Differentiable in
    x and weight. `before` is given without gradient: that of tokens in it goes to x by the plan."""
    if before is not None:
        # The package keeps W inputs of each segment, channels first; nothing depends on the first.
        before = F.pad(before.transpose(1, 2), (1, 0)).contiguous()
    apply: Any = _Convolution.apply
    # The kernels of backward read the weight row by row, whatever its strides are.
    output, last = apply(x, weight.to(x.dtype).contiguous(), before, plan, gives_final)
    return output, None if last is None else last[:, :, 1:].transpose(1, 2)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor | None]:
        x, weight, before, plan, gives_final = args
        output, last = causal_conv1d_fwd(
            x=x[None],
            weight=weight,
            bias=None,
            residual=None,
            initial_state=before,
            output_final_state=gives_final,
            activation="silu",
            cu_seqlens=plan.cu_seqlens,
            chunk_indices=plan.chunks,  # which it would otherwise compute and send, waiting for it
        )
        ctx.save_for_backward(x, weight, before)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        if last is not None:
            ctx.mark_non_differentiable(last)
        return output[0], last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, before = ctx.saved_tensors
        plan: SegmentPlan = ctx.plan
        dx, dweight, _, _, dbefore = causal_conv1d_bwd(
            x=x.contiguous()[None],
            dy=grads[0].contiguous()[None],
            dht=None,
            weight=weight,
            initial_state=before,
            activation="silu",
            cu_seqlens=plan.cu_seqlens,
            chunk_indices=plan.chunks,
        )
        dx = dx[0]
        if plan.before is not None:
            numbers, places = plan.before
            of_inputs = dbefore[:, :, 1:]
            if missing := BEFORE + 1 - weight.shape[1]:
                of_inputs = F.pad(of_inputs, (missing, 0))
            found = of_inputs.transpose(1, 2).flatten(0, 1)[numbers].to(dx.dtype)
            dx.index_put_((places,), found, accumulate=True)
        return dx, dweight, None, None, None
