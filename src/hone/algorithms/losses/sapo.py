"""SAPO, soft adaptive policy optimisation, arXiv:2511.20347: a smooth gate in place of clipping."""

from __future__ import annotations

import torch

from hone.algorithms.corrections import importance_ratio
from hone.algorithms.policy_loss import LossInputs, LossTerms
from hone.config.algorithm import AlgorithmConfig

_TAU_POSITIVE, _TAU_NEGATIVE = 1.0, 1.05
"""Temperatures by the sign of the advantage, as in the paper: negative ones spread over the whole
vocabulary and disturb training more."""


def loss(inputs: LossInputs, cfg: AlgorithmConfig) -> LossTerms:
    """`-4 / tau sigmoid(tau (ratio - 1)) A`, whose slope at ratio 1 is that of `-ratio A`."""
    del cfg
    ratio = importance_ratio(inputs.logprobs - inputs.old_logprobs)
    tau = torch.full_like(ratio, _TAU_NEGATIVE).masked_fill(inputs.advantages > 0, _TAU_POSITIVE)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return LossTerms(-gate * inputs.advantages, torch.zeros_like(ratio, dtype=torch.bool))
