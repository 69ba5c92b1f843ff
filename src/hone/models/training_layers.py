"""The trainer's own forward and backward of Llama, Mistral, Qwen2 and Qwen3.

The decoder runs the skeleton of `hone.models.fused_layers` over packed rows, with gradients written
out by hand, one function of autograd a layer:

* The gradient of a weight is added by the matrix product itself to where it is collected, in
  float32: no product is written out, widened and added afterwards.
* Backward computes norms and the MLP's activation again, within the kernels that need their inputs
  anyway, so they are not kept.
* Between two products runs one kernel of `hone.models.layer_gradients`.

Letters: T packed tokens, D model and head size, H heads, I the MLP's inner size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hone.attention import PackedContext
from hone.attention.interface import attend_packed
from hone.config.trainer import RecomputeMode
from hone.models.decoder import hidden_states
from hone.models.fused_layers import FusedDecoder, FusedLayer, is_fusible

__all__ = [
    "Backbone",
    "GradientOf",
    "TrainingDecoder",
    "has_training_layers",
    "training_backbone",
]

Backbone = Callable[[Tensor, Tensor, PackedContext], Tensor]
"""Hidden states [T, D] after the final norm of ids [T] at positions [T], both int64."""

GradientOf = Callable[[nn.Parameter], Tensor]
"""Where the gradient of a parameter is added up: a tensor of its shape, of float32 or the
parameter's own format, zero before the first pass."""

"""What a layer keeps for backward: with `off` all that costs time to compute again, with
`selective` the results of products and attention alone, with `full` its input alone."""

SaveHooks = Callable[[], AbstractContextManager[None]]
"""`torch.autograd.graph.saved_tensors_hooks`, under which such inputs are kept."""


def has_training_layers(model: PreTrainedModel) -> bool:
    """Whether `training_backbone` gives a `TrainingDecoder`: on CUDA, for what `is_fusible`."""
    return model.device.type == "cuda" and find_spec("triton") is not None and is_fusible(model)


def training_backbone(
    model: PreTrainedModel,
    gradient_of: GradientOf | None = None,
    *,
    recompute: RecomputeMode = "off",
    every: int = 1,
    save_hooks: SaveHooks | None = None,
) -> Backbone:
    """The fastest backbone there is for the model, over packed rows of one process.

    That is a `TrainingDecoder` with these arguments, else the model's own modules, which whoever
    owns the model makes recompute and compiles.
    """
    if not has_training_layers(model):
        return partial(hidden_states, model)
    return TrainingDecoder(
        model, gradient_of, recompute=recompute, every=every, save_hooks=save_hooks
    )


class TrainingDecoder(FusedDecoder):
    """The backbone of a model that `is_fusible`, from token ids to the final norm, with gradients.

    Backward adds the gradient of each parameter that requires one to where `gradient_of` says, and
    gives none to autograd: hooks of parameters do not run, and `torch.autograd.grad` does not see
    parameters. A pass goes backward once.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        gradient_of: GradientOf | None = None,
        *,
        recompute: RecomputeMode = "off",
        every: int = 1,
        save_hooks: SaveHooks | None = None,
    ) -> None:
        """Merges parameters of `model` as `FusedDecoder` does.

        `gradient_of` is by default the parameter's own `grad`. Layers 0, `every`, 2 `every` and so
        on do as `recompute` says, the others as with `off`. `save_hooks` are for layers that keep
        their input alone.
        """
        super().__init__(model)
        base: Any = model.base_model
        gradients = _Gradients(gradient_of or _own_gradient)
        self._embedder = _Embedder(base.embed_tokens, gradients)
        self._training_layers = [
            TrainingLayer(layer, module, gradients, recompute if index % every == 0 else "off")
            for index, (layer, module) in enumerate(zip(self.layers, base.layers, strict=True))
        ]
        self._final_norm = _FinalNorm(base.norm.weight, self._eps, gradients)
        self._parameters: list[nn.Parameter] = list(base.parameters())
        self._save_hooks = save_hooks or nullcontext

    def __call__(self, input_ids: Tensor, position_ids: Tensor, context: Any) -> Tensor:
        """Hidden states [T, D] after the final norm of ids [T] at positions [T], both int64, in a
        `PackedContext`. Raises as `FusedDecoder`."""
        assert context.parallel is None, "rows that are split over processes are not served"
        self._check_places()
        with torch.inference_mode(False):  # the table outlives this call, backward may need it
            rotary = self._rotary.rows(context.max_seqlen)
        row = _Row(position_ids, rotary, context)
        residual = self._embedder(input_ids)
        if torch.is_grad_enabled() and any(p.requires_grad for p in self._parameters):
            residual.requires_grad_()  # or layers above a frozen embedding would get no gradient
        x: Tensor | None = None
        for layer in self._training_layers:
            residual, x = layer(row, residual, x, self._save_hooks)
        return self._final_norm(residual, x)


class _Gradients:
    """Adds to the gradients of parameters, of those that require one."""

    def __init__(self, gradient_of: GradientOf) -> None:
        self._gradient_of = gradient_of

    def of(self, parameter: Tensor) -> Tensor:
        return self._gradient_of(cast(nn.Parameter, parameter))

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        if parameter.requires_grad:
            self.of(parameter).add_(gradient)

    def add_linear(self, linear: nn.Linear, grad_TN: Tensor, x_TK: Tensor) -> None:
        """That of a linear layer, which took x and whose result has the gradient `grad`."""
        weight, bias = linear.weight, cast(Tensor | None, linear.bias)
        if weight.requires_grad:
            total_NK = self.of(weight)
            if total_NK.dtype == x_TK.dtype:
                total_NK.addmm_(grad_TN.T, x_TK)
            else:
                add = torch.ops.aten.addmm.dtype_out
                add(total_NK, grad_TN.T, x_TK, total_NK.dtype, out=total_NK)
        if bias is not None and bias.requires_grad:
            total_N = self.of(bias)
            total_N.add_(grad_TN.sum(0, dtype=total_N.dtype))


def _own_gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


@dataclass(frozen=True, slots=True)
class _Row:
    """What all layers of a pass are told."""

    positions: Tensor
    rotary: Tensor
    context: PackedContext


class _Attention:
    """Attention of merged and rotated heads, and its gradient."""

    def __init__(
        self, layer: FusedLayer, qkv: Tensor, rotated: Tensor, row: _Row, *, with_gradient: bool
    ) -> None:
        num_rotated = rotated.shape[1]
        q, k = rotated.split((layer.num_heads, num_rotated - layer.num_heads), 1)
        v = qkv[:, num_rotated:]
        if with_gradient:
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        with torch.set_grad_enabled(with_gradient):
            output = attend_packed(q, k, v, row.context, scale=layer.scale, window=layer.window)
        self._inputs, self._output = (q, k, v), output
        self.rotated = rotated

    @property
    def output(self) -> Tensor:
        """[T, H D]"""
        return self._output.detach().flatten(1)

    def gradients(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Those of queries, keys and values, [T, H, D] each, given that of the output."""
        q, k, v = torch.autograd.grad(self._output, self._inputs, grad.view_as(self._output))
        return q, k, v


@dataclass(slots=True)
class _Activations:
    """What backward of a layer starts from, [T, ...] each."""

    residual: Tensor
    qkv: Tensor
    attention: _Attention
    mlp_residual: Tensor
    gate_up: Tensor


class TrainingLayer:
    """One decoder layer over packed rows, with gradients for the parameters of `module`."""

    def __init__(
        self, layer: FusedLayer, module: Any, gradients: _Gradients, recompute: RecomputeMode
    ) -> None:
        from hone.models import layer_gradients, layer_kernels  # need triton, absent on CPUs

        self._ops = layer_gradients
        self._silu_mul = layer_kernels.silu_mul
        self._layer = layer
        self._first_norm: nn.Parameter = module.input_layernorm.weight
        self._attn, self._mlp = module.self_attn, module.mlp
        self._gradients = gradients
        self.recompute: RecomputeMode = recompute

    def __call__(
        self, row: _Row, residual: Tensor, x: Tensor | None, save_hooks: SaveHooks
    ) -> tuple[Tensor, Tensor]:
        """What the layer adds to the residual stream, and the stream it is to be added to.

        Takes such a pair, [T, D] each; the first layer's has no sum to make yet.
        """
        if not torch.is_grad_enabled():
            activations = self.run(row, residual, x, with_gradient=False)
            return activations.mlp_residual, self.finish(activations)
        hooks = save_hooks() if self.recompute == "full" else nullcontext()
        with hooks:
            return _RunLayer.apply(self, row, residual, x)

    def run(
        self, row: _Row, residual: Tensor, x: Tensor | None, *, with_gradient: bool
    ) -> _Activations:
        """All of the layer's forward but its end."""
        layer = self._layer
        residual, normed = self._ops.add_norm(residual, x, self._first_norm, layer.eps)
        qkv = F.linear(normed, *layer.qkv).view(len(normed), -1, layer.head_dim)
        attention = _Attention(layer, qkv, self.rotate(row, qkv), row, with_gradient=with_gradient)
        x = F.linear(attention.output, *layer.o)
        mlp_residual, normed = self._ops.add_norm(residual, x, layer.mlp_norm, layer.eps)
        gate_up = F.linear(normed, *layer.gate_up)
        return _Activations(residual, qkv, attention, mlp_residual, gate_up)

    def finish(self, activations: _Activations) -> Tensor:
        """The end: what the MLP adds to the residual."""
        return F.linear(self._silu_mul(activations.gate_up), *self._layer.down)

    def rotate(self, row: _Row, qkv: Tensor, out: Tensor | None = None) -> Tensor:
        """`layer_gradients.rotate` of this layer's heads."""
        layer = self._layer
        return self._ops.rotate(
            qkv,
            row.positions,
            row.rotary,
            layer.q_norm,
            layer.k_norm,
            layer.eps,
            layer.num_heads,
            out=out,
        )

    def backward(
        self, row: _Row, kept: _Activations, grad_residual: Tensor, grad_x: Tensor
    ) -> Tensor:
        """The gradient of the layer's input, [T, D], given those of what `__call__` returned.

        Adds the parameters' gradients to where they belong. Overwrites `kept.gate_up` where the
        layer has recomputed it.
        """
        grad_residual = self._mlp_backward(kept, grad_residual, grad_x)
        return self._attention_backward(row, kept, grad_residual)

    def _mlp_backward(self, kept: _Activations, grad_residual: Tensor, grad_x: Tensor) -> Tensor:
        layer, mlp = self._layer, self._mlp
        gate_up = kept.gate_up
        grad = grad_x @ layer.down.weight
        grad_gate_up = gate_up if self.recompute == "full" else torch.empty_like(gate_up)
        activated = self._ops.silu_gradients(gate_up, grad, out=grad_gate_up)
        self._gradients.add_linear(mlp.down_proj, grad_x, activated)
        del grad, activated
        found = self._ops.norm_gradients(
            kept.mlp_residual,
            layer.mlp_norm,
            grad_gate_up @ layer.gate_up.weight,
            layer.eps,
            residual_grad=grad_residual,
        )
        of_gate, of_up = grad_gate_up.chunk(2, -1)
        self._gradients.add_linear(mlp.gate_proj, of_gate, found.normed)
        self._gradients.add_linear(mlp.up_proj, of_up, found.normed)
        self._gradients.add(layer.mlp_norm, found.weight)
        return found.x

    def _attention_backward(self, row: _Row, kept: _Activations, grad_residual: Tensor) -> Tensor:
        layer, attn, ops = self._layer, self._attn, self._ops
        self._gradients.add_linear(attn.o_proj, grad_residual, kept.attention.output)
        heads = ops.rotate_gradients(
            kept.qkv,
            kept.attention.gradients(grad_residual @ layer.o.weight),
            row.positions,
            row.rotary,
            layer.q_norm,
            layer.k_norm,
            layer.eps,
        )
        grad_qkv = heads.qkv.flatten(1)
        found = ops.norm_gradients(
            kept.residual,
            self._first_norm,
            grad_qkv @ layer.qkv.weight,
            layer.eps,
            residual_grad=grad_residual,
        )
        linears: list[nn.Linear] = [attn.q_proj, attn.k_proj, attn.v_proj]
        parts = grad_qkv.split([linear.out_features for linear in linears], -1)
        for linear, part in zip(linears, parts, strict=True):
            self._gradients.add_linear(linear, part, found.normed)
        self._gradients.add(self._first_norm, found.weight)
        for norm, gradient in ((layer.q_norm, heads.q_norm), (layer.k_norm, heads.k_norm)):
            if norm is not None and gradient is not None:
                self._gradients.add(norm, gradient)
        return found.x


class _RunLayer(torch.autograd.Function):
    """A layer from its input to the pair of tensors whose sum is its output."""

    @staticmethod
    def forward(
        ctx: Any, layer: TrainingLayer, row: _Row, residual: Tensor, x: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        is_full = layer.recompute == "full"
        found = layer.run(row, residual, x, with_gradient=not is_full)
        output = layer.finish(found)
        ctx.layer, ctx.row = layer, row
        if is_full:
            ctx.save_for_backward(found.residual)
            return found.mlp_residual, output
        ctx.attention = found.attention
        ctx.save_for_backward(found.residual, found.qkv, found.mlp_residual, found.gate_up)
        if layer.recompute == "selective" and not _shares_memory(found):
            found.attention.rotated.untyped_storage().resize_(0)
        return found.mlp_residual, output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor, Tensor | None]:
        layer: TrainingLayer = ctx.layer
        row: _Row = ctx.row
        grad_residual, grad_x = (grad.contiguous() for grad in grads)
        if layer.recompute == "full":
            (residual,) = ctx.saved_tensors
            kept = layer.run(row, residual, None, with_gradient=True)
        else:
            residual, qkv, mlp_residual, gate_up = ctx.saved_tensors
            kept = _Activations(residual, qkv, ctx.attention, mlp_residual, gate_up)
            del ctx.attention  # its memory is free as soon as this layer is done
        rotated = kept.attention.rotated
        storage = rotated.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(rotated.nbytes)
            layer.rotate(row, kept.qkv, out=rotated)
        grad = layer.backward(row, kept, grad_residual, grad_x)
        return None, None, grad, grad if ctx.needs_input_grad[3] else None


def _shares_memory(found: _Activations) -> bool:
    """Whether queries and keys were rotated in place."""
    return found.attention.rotated.data_ptr() == found.qkv.data_ptr()


class _Embedder:
    """The input embedding, whose gradient is added row by row in a fixed order."""

    def __init__(self, module: nn.Embedding, gradients: _Gradients) -> None:
        self.weight = module.weight
        self.padding_idx = module.padding_idx
        self.gradients = gradients

    def __call__(self, input_ids: Tensor) -> Tensor:
        return _Embed.apply(self, input_ids, self.weight)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, embedder: _Embedder, input_ids: Tensor, weight: Tensor) -> Tensor:
        ctx.embedder = embedder
        ctx.save_for_backward(input_ids)
        return F.embedding(input_ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        embedder: _Embedder = ctx.embedder
        (input_ids,) = ctx.saved_tensors
        total_VD = embedder.gradients.of(embedder.weight)
        grad_TD = grads[0].to(total_VD.dtype)
        if embedder.padding_idx is not None:  # its row is no word's and stays as it is
            grad_TD = grad_TD.masked_fill((input_ids == embedder.padding_idx)[:, None], 0)
        total_VD.index_put_((input_ids,), grad_TD, accumulate=True)
        return None, None, None


class _FinalNorm:
    """The sum that the last layer leaves, and the norm of it."""

    def __init__(self, weight: nn.Parameter, eps: float, gradients: _Gradients) -> None:
        from hone.models import layer_gradients  # needs triton, absent on CPUs

        self.ops = layer_gradients
        self.weight = weight
        self.eps = eps
        self.gradients = gradients

    def __call__(self, residual: Tensor, x: Tensor | None) -> Tensor:
        return _Finish.apply(self, residual, x)


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, norm: _FinalNorm, residual: Tensor, x: Tensor | None) -> Tensor:
        total, normed = norm.ops.add_norm(residual, x, norm.weight, norm.eps)
        ctx.norm = norm
        ctx.save_for_backward(total)
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor]:
        norm: _FinalNorm = ctx.norm
        (total,) = ctx.saved_tensors
        found = norm.ops.norm_gradients(total, norm.weight, grads[0].contiguous(), norm.eps)
        norm.gradients.add(norm.weight, found.weight)
        return None, found.x, found.x
