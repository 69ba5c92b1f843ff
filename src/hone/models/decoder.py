"""One transformers decoder, used the same way by trainer and engine.

The model is split in two: the *backbone* turns packed token ids into hidden states (its attention
layers read the context), the *head* turns the hidden states that matter into logits. Logits
of a whole batch never have to exist. Letters: T packed tokens, N chosen rows, D model, V vocab.
"""

from __future__ import annotations

import copy
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hone.attention import AttentionContext

__all__ = ["alias_module", "head_logits", "head_weight", "hidden_states", "logit_softcap"]


def hidden_states(
    model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, context: AttentionContext
) -> Tensor:
    """Hidden states [T, D] after the final norm, for ids [T] and positions [T] (both int64)."""
    output = model.base_model(
        input_ids=input_ids.unsqueeze(0),
        position_ids=position_ids.unsqueeze(0),
        use_cache=False,
        attention_context=context,
    )
    return output.last_hidden_state.squeeze(0)


def head_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits [N, V] of hidden states [N, D], in the model's dtype, final soft cap included."""
    logits = hidden @ head_weight(model).T
    cap = logit_softcap(model)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def head_weight(model: PreTrainedModel) -> nn.Parameter:
    """The output projection [V, D]; the embedding itself where the weights are tied."""
    return cast(nn.Parameter, cast(nn.Linear, model.get_output_embeddings()).weight)


def logit_softcap(model: PreTrainedModel) -> float | None:
    """Bound c of the final logits, which are c * tanh(logits / c); None where there is none."""
    return getattr(model.config, "final_logit_softcapping", None)


def alias_module(model: PreTrainedModel) -> PreTrainedModel:
    """A second module over the very same parameter and buffer tensors, in eval mode.

    Its own are the module objects, so hooks, compiled forwards and train/eval mode can differ; an
    optimizer step on one is at once seen by the other, and tied weights stay tied.
    """
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}).eval()
