"""Keys and values of sequences that begin with tokens of another sequence.

The completions of a prompt have its tokens in common, so only one of them includes these tokens,
and their keys and values are copied to the others. Attention needs no change: the queries of a
sequence are its last tokens. Per layer and copied token this moves some kilobytes; passing the
token through the layer again takes millions of operations.

Merging the attention to a prompt into that of each completion by log-sum-exps was tried first: with
prompts of 128 and completions of 1,024 tokens a step was 0.86 times as fast as with repeated
prompts. Copying keys makes it 1.04 times as fast (benchmarks/README.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.types import PackedKeys

__all__ = ["gather_keys"]


def gather_keys(k: Tensor, v: Tensor, keys: PackedKeys) -> tuple[Tensor, Tensor]:
    """Gather all keys and values [K, H, D] from those of the packed tokens [T, H, D];
    differentiable. A token's gradient is summed over its uses in float32 or wider, always in the
    same order."""
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
