"""The head of a critic: one number for each hidden state in place of a distribution over words.

Its layout is that of sequence classification with one label in transformers, `score` [1, D] behind
the final norm, so that `AutoModelForSequenceClassification` loads what is saved.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

__all__ = ["has_value_head", "token_values", "value_head"]


def has_value_head(model: PreTrainedModel) -> bool:
    """Whether a model gives values in place of words."""
    return model.get_output_embeddings() is None


def value_head(model: PreTrainedModel) -> nn.Linear:
    """The head of a model that gives values."""
    return cast(nn.Linear, model.score)


def token_values(model: PreTrainedModel, hidden_ND: Tensor) -> Tensor:
    """Values [N] of hidden states, in float32 or wider: returns are compared with them, whose
    differences bfloat16 would round away."""
    weight_1D: Tensor = value_head(model).weight
    if isinstance(weight_1D, DTensor):  # whole on every rank of the tensor axis
        weight_1D = weight_1D.to_local()
    dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
    return (hidden_ND.to(dtype) @ weight_1D.to(dtype).T).squeeze(-1)
