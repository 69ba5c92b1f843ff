"""Layers of transformers with gated linear attention, computed over packed tokens.

transformers computes whole sequences, or one token of a sequence from its cache. Over packed rows
its convolution and its recurrence would run on from one sample into the next, so `follow_segments`
gives its modules another forward over the same parameters.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hone.attention.recurrent.delta_rule import log_decay
from hone.attention.recurrent.mixing import DeltaHeads, Mixed, mix

__all__ = ["follow_segments", "gated_rms_norm"]


def follow_segments(model: PreTrainedModel) -> None:
    """Let the recurrent layers of `model` read segments and states from the context, in place.
    Call before its layers are compiled. Idempotent."""
    for module in model.modules():
        if _is_recurrent(module) and not isinstance(module.__dict__.get("forward"), _DeltaNet):
            module.forward = _DeltaNet(module)


def _is_recurrent(module: nn.Module) -> bool:
    return hasattr(module, "A_log") and hasattr(module, "in_proj_qkv")


class _DeltaNet:
    """Forward of a gated delta net over packed tokens. Not a closure: `alias_module` copies it with
    the module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

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
        inputs = Mixed(
            channels=module.in_proj_qkv(x),
            g=log_decay(module.in_proj_a(x), module.A_log, module.dt_bias),
            beta=module.in_proj_b(x).sigmoid(),
        )
        weight = module.conv1d.weight.squeeze(1)
        output = mix(inputs, weight, heads, module.layer_idx, attention_context)
        gate = module.in_proj_z(x).unflatten(-1, output.shape[1:])
        normed = gated_rms_norm(output, gate, module.norm.weight, module.layer_norm_epsilon)
        return module.out_proj(normed.flatten(1)).unsqueeze(0)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm of x [..., V] times weight [V] and silu(gate), in the dtype of x and
    with transformers' order of roundings."""
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = F.rms_norm(x.to(wide), x.shape[-1:], None, eps).to(x.dtype)
    return (weight * normed * F.silu(gate.to(wide))).to(x.dtype)
