"""Decoders in exact mode: the engine's, and the trainer's that computes the same bits.

Both run the operations of `hone.models.fused_layers` over the same merged parameters, with the
matrix product of `hone.models.exact` and the attention of `hone.attention.exact`: the engine
against its paged cache, the trainer over packed rows and with gradients.

Letters: T packed tokens, D model and head size, H heads, I the MLP's inner size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hone.attention import PackedContext, PagedContext
from hone.config.errors import UserError
from hone.models.exact import exact_supported, linear
from hone.models.fused_layers import (
    FusedDecoder,
    FusedLayer,
    Projection,
    TorchOps,
    is_fusible,
)

__all__ = ["ExactLayer", "PackedDecoder", "require_exact"]


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


class ExactLayer(FusedLayer):
    """A decoder layer that generates; a token's result does not depend on its batch."""

    __slots__ = ()

    def linear(self, x: Tensor, projection: Projection) -> Tensor:
        return linear(x, *projection)

    def sum_linear(self, x: Tensor, projection: Projection) -> Tensor:
        return linear(x, *projection)

    def gated_linear(self, x: Tensor, projection: Projection) -> Tensor:
        return self.ops.silu_mul(linear(x, *projection))

    def attend_paged(
        self, q: Tensor, k: Tensor, v: Tensor, context: PagedContext, *, write: bool
    ) -> Tensor:
        from hone.attention import exact  # needs triton, absent on CPUs

        assert not write, "a cache of its own format has no exact attention"
        return exact.paged_attention(
            q, context.kv_caches[self.index], context, scale=self.scale, window=self.window
        )


class PackedDecoder(FusedDecoder):
    """The backbone of a model that `is_fusible` over packed rows, differentiable.

    Hidden states have the bits of a `FusedDecoder` of `ExactLayer`s. Gradients are those of
    ordinary products and torch operations and reach the model's own parameters.
    """

    def __init__(self, model: PreTrainedModel, *, recompute: bool) -> None:
        """Merges parameters as `FusedDecoder` does. `recompute` keeps only each layer's input for
        backward."""
        super().__init__(model)
        self._recompute = recompute
        self._differentiable = _differentiable_ops(model.device)
        base: Any = model.base_model
        self._padding_idx: int | None = base.embed_tokens.padding_idx
        self._packed_layers = [
            PackedLayer(layer, module, self._differentiable)
            for layer, module in zip(self.layers, base.layers, strict=True)
        ]

    def __call__(self, input_ids: Tensor, position_ids: Tensor, context: Any) -> Tensor:
        """Hidden states [T, D] after the final norm of ids [T] at positions [T], both int64, in a
        `PackedContext`. Raises as `FusedDecoder`."""
        self._check_places()
        residual = F.embedding(input_ids, self._embedding, self._padding_idx)
        with torch.inference_mode(False):  # the table outlives this call, gradients may need it
            rotary = self._rotary.rows(context.max_seqlen)
        x = self._differentiable.rms_norm(residual, self._first_norm, self._eps)
        for layer in self._packed_layers:
            if self._recompute and torch.is_grad_enabled():
                x, residual = checkpoint(
                    layer,
                    x,
                    residual,
                    position_ids,
                    rotary,
                    context,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            else:
                x, residual = layer(x, residual, position_ids, rotary, context)
        return x


class PackedLayer:
    """One decoder layer over packed rows, with gradients for the parameters of `module`."""

    def __init__(self, layer: FusedLayer, module: Any, ops: DifferentiableOps) -> None:
        attention, mlp = module.self_attn, module.mlp
        self._layer = layer
        self._ops = ops
        self._qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._gate_up = (mlp.gate_proj, mlp.up_proj)

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        positions: Tensor,
        rotary: Tensor,
        context: PackedContext,
    ) -> tuple[Tensor, Tensor]:
        """From the normed residual x and the residual, both [T, D], to those of the next layer."""
        layer, ops = self._layer, self._ops
        attended = self._attend(x, positions, rotary, context)
        # The engine adds and norms in one kernel, which rounds the sum as torch does.
        residual = residual + linear(attended, *layer.o)
        x = ops.rms_norm(residual, layer.mlp_norm, layer.eps)
        gate_up = _merged_linear(x, layer.gate_up, self._gate_up)
        residual = residual + linear(ops.silu_mul(gate_up), *layer.down)
        return ops.rms_norm(residual, layer.next_norm, layer.eps), residual

    def _attend(
        self, x: Tensor, positions: Tensor, rotary: Tensor, context: PackedContext
    ) -> Tensor:
        from hone.attention import exact  # needs triton, absent on CPUs

        layer = self._layer
        q, k, v = self._ops.rotate_heads(
            _merged_linear(x, layer.qkv, self._qkv).view(len(x), -1, layer.head_dim),
            positions,
            rotary,
            layer.q_norm,
            layer.k_norm,
            layer.eps,
            layer.num_heads,
        )
        output = exact.packed_attention(q, k, v, context, scale=layer.scale, window=layer.window)
        return output.flatten(1)


class DifferentiableOps(Protocol):
    """What runs between the products; `hone.models.layer_gradients` says what they take."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def rotate_heads(  # noqa: PLR0917
        self,
        qkv: Tensor,
        positions: Tensor,
        rotary: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        num_heads: int,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def _differentiable_ops(device: torch.device) -> DifferentiableOps:
    if device.type == "cuda":
        from hone.models import layer_gradients  # needs triton, absent on CPUs

        return layer_gradients
    return DifferentiableTorchOps()


class DifferentiableTorchOps:
    """The operations of `hone.models.layer_gradients` in torch."""

    def __init__(self) -> None:
        self._ops = TorchOps()
        self.rms_norm = self._ops.rms_norm
        self.silu_mul = self._ops.silu_mul

    def rotate_heads(  # noqa: PLR0917
        self,
        qkv: Tensor,
        positions: Tensor,
        rotary: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        num_heads: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._ops.rotate_heads(
            qkv,
            positions,
            rotary,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            num_heads=num_heads,
            kv_cache=None,
            slot_mapping=None,
        )


def _merged_linear(x: Tensor, merged: Projection, linears: Sequence[nn.Linear]) -> Tensor:
    """The product of `merged`, whose gradient goes to the layers that it was made of."""
    weight = _SideBySide.apply(merged.weight, *(layer.weight for layer in linears))
    bias = merged.bias
    if bias is not None:
        bias = _SideBySide.apply(bias, *(layer.bias for layer in linears))
    return linear(x, weight, cast(Tensor | None, bias))


class _SideBySide(torch.autograd.Function):
    """The tensor of which parameters are adjacent views; its gradient is cut into theirs."""

    @staticmethod
    def forward(ctx: Any, merged: Tensor, *parameters: Tensor) -> Tensor:
        ctx.sizes = [len(parameter) for parameter in parameters]
        return merged.view_as(merged)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *grads[0].split(ctx.sizes))
