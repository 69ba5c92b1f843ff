"""Keys and values of sequences that begin with tokens of another one.

The answers to one prompt have its tokens in common, so one of them brings these tokens along, and
its keys and values are copied to where the others' own begin. Attention then needs nothing new:
the queries of a sequence are the last of its tokens. Per layer and copied token this moves some
kilobytes, where passing the token through the layer once more takes millions of operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.types import PackedKeys

__all__ = ["gather_keys"]


def gather_keys(k: Tensor, v: Tensor, keys: PackedKeys) -> tuple[Tensor, Tensor]:
    """All keys and values, [K, H, D], from those of the packed tokens, [T, H, D]; differentiable.
    The gradient of a token is summed over its uses in float32 or wider, in the same order each
    time."""
    return _GatherKeys.apply(k, v, keys)


class _GatherKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, keys: PackedKeys) -> tuple[Tensor, Tensor]:
        ctx.keys = keys
        if _has_kernels(k):
            from hone.attention import packed_keys_kernels  # needs triton, absent on CPUs

            return packed_keys_kernels.gather(k, v, keys.index)
        return k.index_select(0, keys.index), v.index_select(0, keys.index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        keys: PackedKeys = ctx.keys
        grad_k, grad_v = grads
        if _has_kernels(grad_k):
            from hone.attention import packed_keys_kernels  # needs triton, absent on CPUs

            return *packed_keys_kernels.sum_uses(grad_k, grad_v, keys.uses, keys.uses_starts), None
        return _sum_uses(grad_k, keys), _sum_uses(grad_v, keys), None


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64


def _sum_uses(grad: Tensor, keys: PackedKeys) -> Tensor:
    wide = torch.promote_types(grad.dtype, torch.float32)
    total = grad.new_zeros(len(keys.uses_starts) - 1, *grad.shape[1:], dtype=wide)
    return total.index_add_(0, keys.index, grad.to(wide)).to(grad.dtype)
