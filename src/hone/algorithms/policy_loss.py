"""What a policy loss is given and gives: one value for each trained token.

`ratio = exp(logprobs - old_logprobs)`, where the old log-probabilities are the trainer's own
before the update. A loss returns values, never a mean: `aggregation.py` holds the normalisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hone.config.algorithm import AlgorithmConfig

__all__ = ["LossInputs", "LossTerms", "clipped_surrogate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What a policy loss may look at. All tensors are float32 of shape [N]."""

    logprobs: Tensor
    """Of the policy being trained; carries the gradient."""
    old_logprobs: Tensor
    advantages: Tensor
    sequence_index: Tensor  # [N] int64
    num_sequences: int


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Loss of each token and whether clipping cut its gradient."""

    values: Tensor  # [N]
    clipped: Tensor  # [N] bool


def clipped_surrogate(ratio: Tensor, advantages: Tensor, cfg: AlgorithmConfig) -> LossTerms:
    """`max(-ratio A, -clip(ratio, 1 - low, 1 + high) A)`."""
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * advantages
    return LossTerms(torch.maximum(unclipped, clipped), clipped.detach() > unclipped.detach())
