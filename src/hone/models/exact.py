"""Exact mode: operations whose result for a token is the same bits in training and generation.

Trainer and engine then compute equal log-probabilities, not close ones. A token's result may not
depend on the batch, its padding, the chunks of a prompt or the packing, so the forward runs kernels
with a fixed order of additions on both sides: `linear` here, `hone.attention.exact`, and kernels
that work row by row (`hone.models.layer_kernels`). Gradients need no such care.

Letters: T rows (tokens), N outputs, K inputs.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hone.families.registry import FUSED_FAMILIES

__all__ = ["exact_supported", "linear"]

DTYPES = (torch.bfloat16, torch.float16)
MIN_CAPABILITY = (8, 0)
"""Compute capability from which matrix units take bfloat16."""
ALIGNMENT = 8
"""16-bit numbers in the 16 bytes that a row of a matrix must start at a multiple of."""


def linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`x @ weight.T + bias` as [T, N] in `dtype`, by default that of x; differentiable.

    A row's bits do not depend on T or the other rows. bfloat16 or float16 on CUDA, summed in
    float32; rows are contiguous and start at multiples of 16 bytes. Backward is two ordinary
    matrix products in the dtype of x.
    """
    operands = (x_TK, weight_NK) if bias_N is None else (x_TK, weight_NK, bias_N)
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        return _Linear.apply(x_TK, weight_NK, bias_N, dtype)
    return _matmul(x_TK, weight_NK, bias_N, dtype)


class _Linear(torch.autograd.Function):
    """`linear` with the gradient of torch.nn.functional.linear."""

    @staticmethod
    def forward(
        ctx: Any, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, dtype: torch.dtype | None
    ) -> Tensor:
        ctx.save_for_backward(x_TK, weight_NK)
        ctx.has_bias = bias_N is not None
        return _matmul(x_TK, weight_NK, bias_N, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TK, weight_NK = ctx.saved_tensors
        grad_TN = grads[0].to(x_TK.dtype)
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        return (
            grad_TN @ weight_NK if needs_x else None,
            grad_TN.T @ x_TK if needs_weight else None,
            grad_TN.sum(0) if ctx.has_bias and needs_bias else None,
            None,
        )


def _matmul(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, dtype: torch.dtype | None
) -> Tensor:
    from hone.models import exact_kernel  # needs triton, absent on CPUs

    return exact_kernel.matmul(x_TK, weight_NK, bias_N, dtype=dtype)


def exact_supported(config: PreTrainedConfig, device: torch.device) -> str | None:
    """Why exact mode cannot serve this model on this device; None where it can."""
    if device.type != "cuda":
        return (
            "exact mode runs Triton kernels on a CUDA GPU, and products on other devices depend on "
            f"the batch: got {device.type}; set run.device=cuda"
        )
    if not find_spec("triton"):
        return "exact mode runs Triton kernels, and triton is not installed: pip install triton"
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"exact mode needs a GPU of compute capability 8.0 or later, got {name}"
    return _unserved(config)


def _unserved(config: PreTrainedConfig) -> str | None:
    """What of the model the kernels do not compute."""
    from hone.attention.exact import HEAD_DIMS  # needs triton

    family = config.model_type
    if family not in FUSED_FAMILIES or getattr(config, "hidden_act", "silu") != "silu":
        return (
            f"exact mode serves models of the families {', '.join(FUSED_FAMILIES)} with the "
            f"activation silu, got {family} with {getattr(config, 'hidden_act', 'none')}"
        )
    if config.dtype is not None and config.dtype not in DTYPES:
        return (
            "exact mode computes in bfloat16 or float16, got "
            f"{str(config.dtype).removeprefix('torch.')}; set model.dtype=bfloat16"
        )
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or hidden // heads)
    if head_dim not in HEAD_DIMS:
        return f"exact mode serves heads of {', '.join(map(str, HEAD_DIMS))}, got {head_dim}"
    widths = {
        "hidden_size": hidden,
        "intermediate_size": int(config.intermediate_size),
        "num_attention_heads * head_dim": heads * head_dim,
    }
    if odd := [f"{name}={width}" for name, width in widths.items() if width % ALIGNMENT]:
        return f"exact mode needs widths that are multiples of {ALIGNMENT}, got {', '.join(odd)}"
    return None
