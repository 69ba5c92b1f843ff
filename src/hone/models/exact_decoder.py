"""Exact mode: the operations of a layer that an engine and its trainer compute the same bits with.

Both run `hone.models.fused_layers` over the same merged parameters, with the matrix product of
`hone.models.exact` and the attention of `hone.attention.exact`: the engine against its paged cache,
the trainer over packed rows and with gradients.

Letters: T packed tokens, D model and head size, H heads, I the MLP's inner size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hone.attention import PackedContext, PagedContext
from hone.config.errors import UserError
from hone.models.exact import exact_supported, linear
from hone.models.fused_layers import FusedDecoder, is_fusible
from hone.models.layer_ops import Heads, PagedOps, Projection, TorchKernels

__all__ = ["ExactPagedOps", "PackedDecoder", "require_exact"]


def require_exact(model: PreTrainedModel) -> None:
    """Raises UserError where exact mode does not serve this model or its device."""
    reason = exact_supported(model.config, model.device)
    if reason is None and not is_fusible(model):
        reason = (
            "exact mode serves models as transformers has them, with plain linear layers of one "
            f"dtype: this {type(model).__name__} has other modules in it"
        )
    if reason is not None:
        raise UserError(f"model.exact: {reason}; or set model.exact=false")


class ExactPagedOps(PagedOps):
    """Operations of a layer that generates; a token's result does not depend on its batch."""

    def linear(self, x: Tensor, projection: Projection) -> Tensor:
        return linear(x, projection.weight, projection.bias)

    def sum_linear(self, x: Tensor, projection: Projection) -> Tensor:
        return linear(x, projection.weight, projection.bias)

    def gated_linear(self, x: Tensor, projection: Projection) -> Tensor:
        return self.kernels.silu_mul(linear(x, projection.weight, projection.bias))

    def attend_rotated(
        self, q: Tensor, k: Tensor, v: Tensor, heads: Heads, context: PagedContext, *, write: bool
    ) -> Tensor:
        from hone.attention import exact  # needs triton, absent on CPUs

        assert not write, "a cache of its own format has no exact attention"
        cache = context.kv_caches[heads.layer_index]
        return exact.paged_attention(q, cache, context, scale=heads.scale, window=heads.window)


class ExactPackedOps:
    """Operations of a layer over packed rows, with the bits of `ExactPagedOps` and gradients.

    Gradients are those of ordinary products and torch operations and reach the model's parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self._kernels = _differentiable_kernels(device)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._kernels.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        # The engine adds and norms in one kernel, which rounds the sum as torch does.
        residual = residual + x
        return self._kernels.rms_norm(residual, weight, eps), residual

    def linear(self, x: Tensor, projection: Projection) -> Tensor:
        weight, bias, parts = projection
        if parts:
            weight = cast(Tensor, _SideBySide.apply(weight, *(part.weight for part in parts)))
            if bias is not None:
                bias = cast(Tensor, _SideBySide.apply(bias, *(part.bias for part in parts)))
        return linear(x, weight, bias)

    sum_linear = linear

    def gated_linear(self, x: Tensor, projection: Projection) -> Tensor:
        return self._kernels.silu_mul(self.linear(x, projection))

    def attend(
        self, qkv: Tensor, heads: Heads, positions: Tensor, rotary: Tensor, context: PackedContext
    ) -> Tensor:
        from hone.attention import exact  # needs triton, absent on CPUs

        q, k, v = self._kernels.rotate_heads(
            qkv,
            positions,
            rotary,
            q_norm=heads.q_norm,
            k_norm=heads.k_norm,
            eps=heads.eps,
            num_heads=heads.num_heads,
        )
        return exact.packed_attention(q, k, v, context, scale=heads.scale, window=heads.window)

    def num_positions(self, context: PackedContext) -> int:
        return context.max_seqlen


class PackedDecoder(FusedDecoder):
    """The backbone of a model that `is_fusible` over packed rows, differentiable.

    Called in a `PackedContext`. Hidden states have the bits of a `FusedDecoder` of `ExactPagedOps`.
    """

    def __init__(self, model: PreTrainedModel, *, recompute: bool) -> None:
        """Merges parameters as `FusedDecoder` does. `recompute` keeps only each layer's input for
        backward."""
        super().__init__(model, ExactPackedOps(model.device))
        if recompute:
            self.layers = [_Recomputed(layer) for layer in self.layers]


class _Recomputed:
    """A layer that computes its forward again in backward."""

    def __init__(self, layer: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self._layer = layer

    def __call__(self, *args: Any) -> tuple[Tensor, Tensor]:
        if not torch.is_grad_enabled():
            return self._layer(*args)
        return checkpoint(self._layer, *args, use_reentrant=False, preserve_rng_state=False)


class _DifferentiableKernels(Protocol):
    """What runs between the products; `hone.models.layer_gradients` says what they take."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def rotate_heads(
        self,
        qkv: Tensor,
        positions: Tensor,
        rotary: Tensor,
        *,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        num_heads: int,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def _differentiable_kernels(device: torch.device) -> _DifferentiableKernels:
    if device.type == "cuda":
        from hone.models import layer_gradients  # needs triton, absent on CPUs

        return layer_gradients
    return TorchKernels()


class _SideBySide(torch.autograd.Function):
    """The tensor of which parameters are adjacent views; its gradient is cut into theirs."""

    @staticmethod
    def forward(ctx: Any, merged: Tensor, *parameters: Tensor) -> Tensor:
        ctx.sizes = [len(parameter) for parameter in parameters]
        return merged.view_as(merged)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *grads[0].split(ctx.sizes))
