"""Layers of transformers with gated linear attention, computed over packed tokens.

transformers computes whole sequences, or one token of a sequence from its cache. Over packed rows
its convolution and its recurrence would run on from one sample into the next, so `follow_segments`
gives its modules another forward over the same parameters.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hone.attention.recurrent.delta_rule import log_decay
from hone.attention.recurrent.mixing import DeltaHeads, DeltaInputs, mix

__all__ = [
    "DeltaWeights",
    "PackedDeltaNet",
    "Projected",
    "follow_segments",
    "gated_rms_norm",
    "is_recurrent",
    "mix_projected",
    "set_heads",
]


def follow_segments(model: PreTrainedModel) -> None:
    """Let the recurrent layers of `model` read segments and states from the context, in place.
    Call before its layers are compiled. Idempotent."""
    for module in model.modules():
        if is_recurrent(module) and not isinstance(module.__dict__.get("forward"), PackedDeltaNet):
            module.forward = PackedDeltaNet(module)


def is_recurrent(module: nn.Module) -> bool:
    """Whether a module of transformers is a gated delta net."""
    return hasattr(module, "A_log") and hasattr(module, "in_proj_qkv")


def set_heads(module: nn.Module, *, num_key_heads: int, num_value_heads: int) -> None:
    """Put the numbers of heads of one rank into a gated delta net whose weights are the rank's."""
    own: Any = module
    own.num_k_heads, own.num_v_heads = num_key_heads, num_value_heads
    own.key_dim = num_key_heads * own.head_k_dim
    own.value_dim = num_value_heads * own.head_v_dim
    own.conv_dim = 2 * own.key_dim + own.value_dim
    conv = own.conv1d
    conv.in_channels = conv.out_channels = conv.groups = own.conv_dim


class DeltaWeights(NamedTuple):
    """The weights of a gated delta net outside of its linear layers, of this rank's heads: C
    channels of the convolution, W weights of a channel, H value heads, V size of a value head."""

    convolution: Tensor  # [C, W]
    A_log: Tensor  # [H]
    dt_bias: Tensor  # [H]
    norm: Tensor  # [V]


class PackedDeltaNet:
    """Forward of a gated delta net over packed tokens. Not a closure: `alias_module` copies it with
    the module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def weights(self) -> DeltaWeights:
        """The module's own parameters. Its convolution and its norm are never called."""
        module: Any = self.module
        convolution = module.conv1d.weight.squeeze(1)
        return DeltaWeights(convolution, module.A_log, module.dt_bias, module.norm.weight)

    def __call__(
        self, hidden_states: Tensor, *_: Any, attention_context: Any = None, **__: Any
    ) -> Tensor:
        module: Any = self.module
        x = hidden_states.squeeze(0)
        heads = DeltaHeads(
            num_key_heads=module.num_k_heads,
            num_value_heads=module.num_v_heads,
            key_dim=module.head_k_dim,
            value_dim=module.head_v_dim,
        )
        projected = Projected(
            channels=module.in_proj_qkv(x),
            gate=module.in_proj_z(x),
            b=module.in_proj_b(x),
            a=module.in_proj_a(x),
        )
        weights, eps = self.weights(), module.layer_norm_epsilon
        output = mix_projected(projected, weights, heads, module, attention_context, eps=eps)
        return module.out_proj(output.unsqueeze(0))


class Projected(NamedTuple):
    """What the projections of a gated delta net give for T tokens, of this rank's heads."""

    channels: Tensor  # [T, C], before the convolution
    gate: Tensor  # [T, H * V], gates of the outputs
    b: Tensor  # [T, H], from which step sizes follow
    a: Tensor  # [T, H], from which decays follow


def mix_projected(
    projected: Projected,
    weights: DeltaWeights,
    heads: DeltaHeads,
    layer: Any,
    context: Any,
    *,
    eps: float,
) -> Tensor:
    """Outputs [T, H * V] of the heads. `layer` and `context` are those of `mix`."""
    channels, gate, b, a = projected
    g = log_decay(a, weights.A_log, weights.dt_bias)
    inputs = DeltaInputs(channels=channels, g=g, beta=b.sigmoid())
    output = mix(inputs, weights.convolution, heads, layer, context)
    gate = gate.unflatten(-1, output.shape[1:])
    return gated_rms_norm(output, gate, weights.norm, eps).flatten(1)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm of x [..., V] times weight [V] and silu(gate), in the dtype of x and
    with transformers' order of roundings."""
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = F.rms_norm(x.to(wide), x.shape[-1:], None, eps).to(x.dtype)
    return (weight * normed * F.silu(gate.to(wide))).to(x.dtype)
