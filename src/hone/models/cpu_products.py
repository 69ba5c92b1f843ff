"""float32 matrix products on CPUs through oneDNN where MKL, torch's default, is slow.

MKL uses AVX-512 on Intel processors only. There it is taken, since on a Xeon with AMX a step of the
tiny model of benchmarks/vs_trl.py takes 0.42 s with it and 0.52 s with oneDNN. On one core of an
AMD EPYC (Zen 5) it reaches 100 GFLOP/s and oneDNN 230. torch contains oneDNN as the operation that
compiled models call.

oneDNN makes a program of 280 KiB for each shape of a product. torch and oneDNN both keep the
latest 1,024 of them, torch in each thread. Batches of packed rows and steps of an engine have a new
number of tokens each time, so that a process holds half a GiB of programs which it hardly ever uses
again, and seems to leak until then. Here both keep fewer. Rows of decode steps that were filled up
with zeros to a multiple of 16, so that fewer programs are made, gained 5 % of generation on a
processor on which MKL is faster still: taken out.

Letters: T rows (tokens), N outputs, K inputs.
"""

from __future__ import annotations

import os
import platform
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["linear", "multiply_by_onednn"]

_MIN_PRODUCTS = 1 << 20
"""Multiplications below which MKL is faster: a call of oneDNN costs 12 us."""
_CPU_FACTS = Path("/proc/cpuinfo")
"""Where Linux names the maker of the processor."""
_NUM_PROGRAMS = 128
"""Programs that each of the two caches keeps, 36 MiB: those of a training step over some shapes."""

# Both are read at the first product. Those that the user has set stay.
for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(name, str(_NUM_PROGRAMS))


@cache
def _is_faster() -> bool:
    """Whether torch has oneDNN, and no MKL on a processor of Intel."""
    if not torch.backends.mkldnn.is_available():
        return False
    names = platform.processor()
    if _CPU_FACTS.exists():
        names += _CPU_FACTS.read_text(encoding="utf-8")
    return not (torch.backends.mkl.is_available() and "GenuineIntel" in names)


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Compute `torch.nn.functional.linear` with gradient; faster for large float32 products on a
    CPU. Results differ at most by the order of additions."""
    if not _serves(x, weight_NK):
        return F.linear(x, weight_NK, bias_N)
    operands = (x, weight_NK) if bias_N is None else (x, weight_NK, bias_N)
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        return _Linear.apply(x, weight_NK, bias_N)
    return _product(x, weight_NK, bias_N)


def multiply_by_onednn(module: nn.Module) -> None:
    """Where oneDNN is faster, make the linear layers in `module` compute with `linear`, in place.
    Their classes, parameters and hooks stay. For modules of one process, whose weights are
    whole."""
    for layer in module.modules() if _is_faster() else ():
        if type(layer) is nn.Linear:
            cast(Any, layer).forward = partial(_forward, layer)


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)


def _serves(x: Tensor, weight_NK: Tensor) -> bool:
    return (
        _is_faster()
        and x.dtype == weight_NK.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() * len(weight_NK) >= _MIN_PRODUCTS
        and type(weight_NK) in (Tensor, nn.Parameter)  # no sharded tensor
    )


def _product(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight_NK, bias_N, "none", [], "")


class _Linear(torch.autograd.Function):
    """`linear` with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_NK)
        return _product(x, weight_NK, bias_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_NK = ctx.saved_tensors
        (grad,) = grads
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_TN, x_TK = grad.flatten(0, -2), x.flatten(0, -2)
        grad_weight = None
        if needs_weight and len(weight_NK) > x.shape[-1]:  # whichever is faster
            grad_weight = _product(x_TK.T, grad_TN.T).T
        elif needs_weight:
            grad_weight = _product(grad_TN.T, x_TK.T)
        return (
            _product(grad, weight_NK.T) if needs_x else None,
            grad_weight,
            grad_TN.sum(0) if needs_bias else None,
        )
