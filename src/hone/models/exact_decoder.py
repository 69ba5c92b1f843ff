"""Exact mode: layer operations with the same bits in engine and trainer.

Both run `hone.models.fused_layers` over the same merged parameters, with the matrix product of
`hone.models.exact` and the attention of `hone.attention.exact`: the engine with its paged cache,
the trainer over packed rows and with gradients.

Letters: T packed tokens, D model and head size, H heads, I the MLP's inner size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hone.attention import PackedContext, PagedContext
from hone.errors import UserError
from hone.families.model_facts import ModelFacts
from hone.families.registry import inputs_of
from hone.models.compiler import compiled
from hone.models.exact import exact_supported, linear
from hone.models.fused_layers import FusedDecoder, is_fusible
from hone.models.layer_ops import (
    Heads,
    LayerOps,
    Norm,
    Projection,
    TorchKernels,
    choose_kernels,
)

__all__ = ["ExactOps", "PackedDecoder", "require_exact"]


def require_exact(model: PreTrainedModel) -> None:
    """Raise UserError if exact mode does not support this model or its device."""
    reason = exact_supported(model.config, model.device)
    is_dense = ModelFacts.from_config(model.config.to_dict()).has_dense_fused_layers
    if reason is None and inputs_of(model.config).kinds:
        reason = f"exact mode serves text, and this {type(model).__name__} takes images"
    if reason is None and not (is_dense and is_fusible(model)):
        reason = (
            "exact mode serves models as transformers has them, with plain linear layers of one "
            f"dtype: this {type(model).__name__} has other modules in it"
        )
    if reason is not None:
        raise UserError(f"model.exact: {reason}; or set model.exact=false")


class ExactOps(LayerOps):
    """Operations of a layer in generation. A token's result does not depend on its batch."""

    def linear(self, x: Tensor, projection: Projection) -> Tensor:
        return linear(x, projection.weight, projection.bias)

    def sum_linear(self, x: Tensor, projection: Projection) -> Tensor:
        return self.linear(x, projection)

    def gated_linear(self, x: Tensor, projection: Projection) -> Tensor:
        return self.kernels.silu_mul(self.linear(x, projection))

    def attend_rotated(
        self, q: Tensor, k: Tensor, v: Tensor, heads: Heads, context: PagedContext, *, write: bool
    ) -> Tensor:
        from hone.attention import exact  # needs triton, absent on CPUs

        assert not write, "a cache of its own format has no exact attention"
        cache = context.kv_caches[heads.layer_index]
        return exact.paged_attention(q, cache, context, scale=heads.scale, window=heads.window)


class ExactTrainingOps(ExactOps):
    """Operations of a layer over packed rows, with the bits of `ExactOps` and gradients.

    Gradients are those of ordinary products and torch operations and reach the model's parameters.
    """

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        weight, *rest = norm
        return _Differentiable.apply(
            lambda kernels, x, weight: kernels.rms_norm(x, weight, *rest), self.kernels, x, weight
        )

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        # The engine adds and norms in one kernel, which rounds the sum as torch does.
        residual = residual + x
        return self.rms_norm(residual, norm), residual

    def linear(self, x: Tensor, projection: Projection) -> Tensor:
        weight, bias, parts = projection
        if parts:
            weight = cast(Tensor, _SideBySide.apply(weight, *(part.weight for part in parts)))
            if bias is not None:
                bias = cast(Tensor, _SideBySide.apply(bias, *(part.bias for part in parts)))
        return linear(x, weight, bias)

    def gated_linear(self, x: Tensor, projection: Projection) -> Tensor:
        gate_up = self.linear(x, projection)
        return _Differentiable.apply(lambda kernels, x: kernels.silu_mul(x), self.kernels, gate_up)

    def attend(
        self, qkv: Tensor, heads: Heads, positions: Tensor, rotary: Tensor, context: PackedContext
    ) -> Tensor:
        from hone.attention import exact  # needs triton, absent on CPUs

        eps, num_heads = heads.eps, heads.num_heads
        q, k, v = _Differentiable.apply(
            lambda kernels, qkv, positions, rotary, q_norm, k_norm: kernels.rotate_heads(
                qkv.clone(),  # the kernel writes into it
                positions,
                rotary,
                q_norm=q_norm,
                k_norm=k_norm,
                eps=eps,
                num_heads=num_heads,
            ),
            self.kernels,
            qkv,
            positions,
            rotary,
            heads.q_norm,
            heads.k_norm,
        )
        return exact.packed_attention(q, k, v, context, scale=heads.scale, window=heads.window)

    def num_positions(self, context: PackedContext) -> int:
        return context.max_seqlen


class PackedDecoder(FusedDecoder):
    """Differentiable backbone of an `is_fusible` model over packed rows. Called in a
    `PackedContext`. Its hidden states have the same bits as those of a `FusedDecoder` with
    `ExactOps`."""

    def __init__(self, model: PreTrainedModel, *, recompute: bool) -> None:
        """Merge parameters as `FusedDecoder` does. With `recompute` only each layer's input is kept
        for backward."""
        super().__init__(model, ExactTrainingOps(choose_kernels(model.device)))
        if recompute:
            self.layers = [partial(_recomputed, layer) for layer in self.layers]


def _recomputed(layer: Callable[..., tuple[Tensor, Tensor]], *args: Any) -> tuple[Tensor, Tensor]:
    """Run a layer that recomputes its forward in backward."""
    if not torch.is_grad_enabled():
        return layer(*args)
    return checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False)


class _Differentiable(torch.autograd.Function):
    """An operation of the engine's kernels; backward differentiates their reference implementation.

    Called with a function of kernels and tensors, the kernels, and the tensors.
    """

    @staticmethod
    def forward(
        ctx: Any, operation: _Operation, kernels: TorchKernels, *tensors: Tensor | None
    ) -> Any:
        ctx.operation = operation
        ctx.save_for_backward(*tensors)
        return operation(kernels, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[2:]) if needed]
        gradients = _gradients_of(grads[0].device.type)(ctx.operation, tensors, wanted, grads)
        found = dict(zip(wanted, gradients, strict=True))
        return (None, None, *(found.get(i) for i in range(len(tensors))))


_Operation = Callable[..., Any]


@cache
def _gradients_of(device_type: str) -> Callable[..., tuple[Tensor, ...]]:
    """`_gradients`; on CUDA compiled to one or two kernels, which compute in float32 and round
    once."""
    return compiled(_gradients) if device_type == "cuda" else _gradients


def _gradients(
    operation: _Operation,
    tensors: tuple[Tensor | None, ...],
    wanted: list[int],
    grads: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    """Gradients of the tensors with the indices `wanted`, given those of the results."""

    def of_wanted(*values: Tensor) -> Any:
        inputs = list(tensors)
        for i, value in zip(wanted, values, strict=True):
            inputs[i] = value
        return operation(TorchKernels(), *inputs)

    differentiated: Any = torch.func.vjp(of_wanted, *(tensors[i] for i in wanted))
    results, pull_back = differentiated
    return pull_back(grads if isinstance(results, tuple) else grads[0])


class _SideBySide(torch.autograd.Function):
    """The merged tensor of adjacent parameters. Its gradient is split into theirs."""

    @staticmethod
    def forward(ctx: Any, merged: Tensor, *parameters: Tensor) -> Tensor:
        ctx.sizes = [len(parameter) for parameter in parameters]
        return merged.view_as(merged)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *grads[0].split(ctx.sizes))
