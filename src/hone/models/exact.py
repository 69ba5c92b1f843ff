"""Exact mode: operations whose result for a token has the same bits in training and generation.

Trainer and engine then compute equal log-probabilities, not close ones. A token's result must not
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

from hone.families.model_facts import ModelFacts

__all__ = ["exact_supported", "linear"]

DTYPES = (torch.bfloat16, torch.float16)
MIN_CAPABILITY = (8, 0)
"""Compute capability from which matrix units support bfloat16."""


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
    """Reason why exact mode does not support this model on this device, or None."""
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
    if config.dtype is not None and config.dtype not in DTYPES:
        return f"exact mode computes in bfloat16 or float16, got {config.dtype}"
    misfits = ", ".join(ModelFacts.from_config(config.to_dict()).exact_misfits)
    return f"exact mode does not compute {misfits}" if misfits else None
