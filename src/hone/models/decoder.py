"""One transformers decoder, used the same way by trainer and engine.

The model is split in two: the *backbone* turns packed token ids into hidden states (its attention
layers read the context), the *head* turns the hidden states that matter into logits. Logits
of a whole batch never have to exist. Letters: T packed tokens, N chosen rows, D model, V vocab.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hone.attention import AttentionContext
from hone.models import cpu_products
from hone.models.heads import has_value_head, value_head

__all__ = [
    "Elsewhere",
    "alias_module",
    "decoder_layers",
    "head_logits",
    "head_product",
    "head_weight",
    "hidden_states",
    "layer_groups",
    "logit_softcap",
    "only_group",
]


def hidden_states(
    model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, context: AttentionContext
) -> Tensor:
    """Hidden states [T, D] after the final norm, for ids [T] and positions [T], or [A, T] of a
    family whose rule has A axes (both int64).

    Scaled where the model scales its logits, which head and soft cap then need not know.
    """
    hidden = layer_outputs(model, {"input_ids": input_ids.unsqueeze(0)}, position_ids, context)
    scale = _logit_scale(model)
    return hidden.squeeze(0) if scale == 1 else hidden.squeeze(0) * scale


def layer_outputs(
    model: PreTrainedModel,
    entering: Mapping[str, Tensor],
    position_ids: Tensor,
    context: AttentionContext,
) -> Tensor:
    """Output of the layers, [1, T, D], for `input_ids` [1, T], or `inputs_embeds` [1, T, D] in
    place of the embedding's output."""
    output = model.base_model(
        **entering,
        position_ids=position_ids.unsqueeze(-2),  # [1, T], or [A, 1, T]
        use_cache=False,
        attention_context=context,
    )
    return output.last_hidden_state


def head_logits(model: PreTrainedModel, hidden: Tensor, *, exact: bool = False) -> Tensor:
    """Logits [N, V] of hidden states [N, D], including the final soft cap, in the dtype of
    `head_product`.

    Training uses `hone.trainer.logprobs` instead, which is differentiable and holds only a chunk of
    logits at a time.
    """
    logits = head_product(hidden, head_weight(model), exact=exact)
    cap = logit_softcap(model)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def head_product(hidden_ND: Tensor, weight_VD: Tensor, *, exact: bool = False) -> Tensor:
    """Logits [N, V] before any soft cap, for some or all rows of a head.

    They have the operands' dtype or a wider one: on CUDA, products of 16-bit operands stay in
    float32, since rounding them would shift log-probabilities by up to a percent if logits are
    large. With `exact` they are always float32, and a row's bits do not depend on the other rows.
    """
    if exact:
        from hone.models.exact import linear

        return linear(hidden_ND, weight_VD, dtype=torch.float32)
    if hidden_ND.is_cuda and hidden_ND.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(hidden_ND, weight_VD.T, out_dtype=torch.float32)
    return cpu_products.linear(hidden_ND, weight_VD)


class Elsewhere(nn.Module):
    """Replaces a module that is on another process; returns its input."""

    weight = None

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        return hidden_states


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of the backbone, first to last; in a pipeline stage only its own."""
    layers = cast(nn.ModuleList, model.base_model.layers)
    own = [layer for layer in layers if not isinstance(layer, Elsewhere)]
    return layers if len(own) == len(layers) else nn.ModuleList(own)


def layer_groups(model: PreTrainedModel) -> list[nn.ModuleList]:
    """The decoder layers in groups of neighbours: a pipeline stage may have several groups, with
    layers of other stages between them."""
    layers = cast(nn.ModuleList, model.base_model.layers)
    runs = groupby(layers, key=lambda layer: isinstance(layer, Elsewhere))
    return [nn.ModuleList(run) for is_elsewhere, run in runs if not is_elsewhere]


@contextmanager
def only_group(model: PreTrainedModel, number: int) -> Generator[None]:
    """Context manager in which `model` runs only one of its `layer_groups`, and its final norm only
    after the last group. Other modules return their input."""
    base: Any = model.base_model
    layers, norm, groups = base.layers, base.norm, layer_groups(model)
    own = {*groups[number]}
    base.layers = nn.ModuleList(layer if layer in own else Elsewhere() for layer in layers)
    if number < len(groups) - 1:
        base.norm = Elsewhere()
    try:
        yield
    finally:
        base.layers, base.norm = layers, norm


def head_weight(model: PreTrainedModel) -> nn.Parameter:
    """The output projection [V, D]: the embedding if weights are tied; for a value model its
    head."""
    head = model.get_output_embeddings()
    return cast(nn.Parameter, value_head(model).weight if head is None else head.weight)


def logit_softcap(model: PreTrainedModel) -> float | None:
    """Bound c of the final logits, c * tanh(logits / c). None without a soft cap."""
    return getattr(model.config, "final_logit_softcapping", None)


def _logit_scale(model: PreTrainedModel) -> float:
    """Factor of the logits: `1 / logits_scaling` in Granite, `logit_scale` in Cohere."""
    if has_value_head(model):
        return 1.0
    config = model.config
    factor, divisor = (getattr(config, key, None) for key in ("logit_scale", "logits_scaling"))
    return (factor or 1.0) / (divisor or 1.0)


def alias_module(model: PreTrainedModel) -> PreTrainedModel:
    """A second module with the same parameter and buffer tensors, in eval mode.

    Module objects are its own, so hooks, compiled forwards and train/eval mode can differ. An
    optimizer step on one is seen by the other at once, and tied weights stay tied.
    """
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}).eval()
