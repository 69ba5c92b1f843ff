# pyright: reportMissingImports=false
"""The causal convolution by the kernels of `fla-core` 0.6, with gradients.

The package's own functions around these kernels are not called, since kernels would be compiled
again in the middle of a run: for a number of tokens that is a multiple of 16 and for one that is
none, and for segments that begin with zeros. Here all passes have the same compiled kernels.

Letters: T tokens, S segments, C channels, W weights of a channel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from fla.modules.causal_conv1d.ops import (
    causal_conv1d_bwd_kernel,
    causal_conv1d_fwd_kernel,
    causal_conv1d_states_fwd_kernel,
    compute_dh0_kernel,
)
from torch import Tensor

from hone.attention.kernel_launch import next_power_of_2
from hone.segments import BEFORE, CHUNK, SegmentPlan

__all__ = ["convolve"]

_UNREAD = CHUNK
"""In place of sizes that kernels do not read where they read borders of segments, but would be
compiled for. A size that all passes have in common."""
_DH0_CHANNELS, _MOST_STATE_CHANNELS = 32, 256
"""Channels of a program of the kernels that have no launch parameters, as the package has them."""


def convolve(
    x: Tensor, weight: Tensor, plan: SegmentPlan, before: Tensor | None, *, gives_final: bool
) -> tuple[Tensor, Tensor | None]:
    """Outputs [T, C] of all segments, and the last inputs [S, W - 1, C] of each, None unless
    `gives_final`. `before` [S, W - 1, C] are the inputs before each; None: zeros. Differentiable in
    x and weight. `before` is given without gradient: that of tokens in it goes to x by the plan."""
    num_channels, window = weight.shape
    if before is None:
        before = x.new_zeros(len(plan.lengths), num_channels, window)
    else:
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
        output = _convolved(x, weight, before, plan, activation="silu")
        last = _last_inputs(x, weight, before, plan) if gives_final else None
        ctx.save_for_backward(x, weight, before)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        if last is not None:
            ctx.mark_non_differentiable(last)
        return output, last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, before = ctx.saved_tensors
        plan: SegmentPlan = ctx.plan
        dx, dweight, dbefore = _gradients(x.contiguous(), weight, before, grads[0], plan)
        if plan.before is not None:
            numbers, places = plan.before
            of_inputs = dbefore[:, :, 1:]
            if missing := BEFORE + 1 - weight.shape[1]:
                of_inputs = F.pad(of_inputs, (missing, 0))
            found = of_inputs.transpose(1, 2).flatten(0, 1)[numbers].to(dx.dtype)
            dx.index_put_((places,), found, accumulate=True)
        return dx, dweight, None, None, None


def _convolved(
    x: Tensor, weight: Tensor, before: Tensor, plan: SegmentPlan, *, activation: str | None
) -> Tensor:
    """Outputs [T, C] behind the inputs `before` [S, C, W]."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    causal_conv1d_fwd_kernel[_grid(x, plan)](
        x=x,
        y=y,
        weight=weight,
        bias=None,
        residual=None,
        initial_state=before,
        **_strides(x=x),
        **_sizes(weight, plan),
        ACTIVATION=activation,
    )
    return y


def _last_inputs(x: Tensor, weight: Tensor, before: Tensor, plan: SegmentPlan) -> Tensor:
    """The last W inputs [S, C, W] of each segment."""
    num_channels, window = weight.shape
    channels = min(next_power_of_2(num_channels), _MOST_STATE_CHANNELS)
    last = torch.empty_like(before)
    causal_conv1d_states_fwd_kernel[(-(-num_channels // channels) * len(plan.lengths),)](
        x=x,
        initial_state=before,
        final_state=last,
        cu_seqlens=plan.cu_seqlens,
        T=_UNREAD,
        D=num_channels,
        W=window,
        **_strides(x=x),
        BD=channels,
        BW=next_power_of_2(window),
    )
    return last


def _gradients(
    x: Tensor, weight: Tensor, before: Tensor, grad: Tensor, plan: SegmentPlan
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the weight, and of the inputs `before`."""
    num_channels, window = weight.shape
    dy = grad.contiguous()
    y = _convolved(x, weight, before, plan, activation=None)
    dx = torch.empty_like(x)
    dweight = weight.new_empty(len(plan.chunks), *weight.shape, dtype=torch.float32)
    causal_conv1d_bwd_kernel[_grid(x, plan)](
        x=x,
        y=y,
        weight=weight,
        initial_state=before,
        dht=None,
        dy=dy,
        dx=dx,
        dw=dweight,
        db=None,
        **_strides(x=x, dx=dx, dy=dy),
        **_sizes(weight, plan),
        ACTIVATION="silu",
    )
    dbefore = torch.zeros_like(before)
    compute_dh0_kernel[(-(-num_channels // _DH0_CHANNELS) * len(plan.lengths),)](
        dy=dy,
        y=y,
        weight=weight,
        dh0=dbefore,
        dht=None,
        cu_seqlens=plan.cu_seqlens,
        **_strides(dy=dy),
        T=_UNREAD,
        D=num_channels,
        W=window,
        BD=_DH0_CHANNELS,
    )
    return dx, dweight.sum(0).to(weight), dbefore


def _grid(x: Tensor, plan: SegmentPlan) -> Callable[[Mapping[str, int]], tuple[int, int, int]]:
    """Programs of a launch, by the channels `BD` that each serves."""
    return lambda launch: (-(-x.shape[1] // launch["BD"]), len(plan.chunks), 1)


def _strides(**tensors: Tensor) -> dict[str, int]:
    """Strides of tensors [T, C] under the names of the kernels, for which they are [1, T, C]."""
    found: dict[str, int] = {}
    for name, tensor in tensors.items():
        found[f"stride_{name}_n"] = _UNREAD
        found[f"stride_{name}_t"], found[f"stride_{name}_d"] = tensor.stride()
    return found


def _sizes(weight: Tensor, plan: SegmentPlan) -> dict[str, Any]:
    """Arguments that forward and backward share."""
    num_channels, window = weight.shape
    return {
        "cu_seqlens": plan.cu_seqlens,
        "chunk_indices": plan.chunks,
        "B": 1,
        "T": _UNREAD,
        "D": num_channels,
        "W": window,
        "BT": CHUNK,
        "BW": next_power_of_2(window),
    }
