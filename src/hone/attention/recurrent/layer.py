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
    "follow_segments",
    "gated_rms_norm",
    "is_recurrent",
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
        weights = self.weights()
        inputs = DeltaInputs(
            channels=module.in_proj_qkv(x),
            g=log_decay(module.in_proj_a(x), weights.A_log, weights.dt_bias),
            beta=module.in_proj_b(x).sigmoid(),
        )
        output = mix(inputs, weights.convolution, heads, module, attention_context)
        gate = module.in_proj_z(x).unflatten(-1, output.shape[1:])
        normed = gated_rms_norm(output, gate, weights.norm, module.layer_norm_epsilon)
        return module.out_proj(normed.flatten(1).unsqueeze(0))


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm of x [..., V] times weight [V] and silu(gate), in the dtype of x and
    with transformers' order of roundings."""
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = F.rms_norm(x.to(wide), x.shape[-1:], None, eps).to(x.dtype)
    return (weight * normed * F.silu(gate.to(wide))).to(x.dtype)
