"""PPO's clipped surrogate, arXiv:1707.06347, with an asymmetric range (DAPO, arXiv:2503.14476)."""

from __future__ import annotations

import torch

from hone.algorithms.corrections import importance_ratio
from hone.algorithms.policy_loss import LossInputs, LossTerms, clipped_surrogate
from hone.config.algorithm import AlgorithmConfig


def loss(inputs: LossInputs, cfg: AlgorithmConfig) -> LossTerms:
    """For negative advantages no more than the dual bound `-dual_clip A` (arXiv:1912.09729)."""
    ratio = importance_ratio(inputs.logprobs - inputs.old_logprobs)
    terms = clipped_surrogate(ratio, inputs.advantages, cfg)
    if cfg.dual_clip is None:
        return terms
    bound = -cfg.dual_clip * inputs.advantages
    cut = (inputs.advantages < 0) & (terms.values.detach() > bound)
    return LossTerms(torch.where(cut, bound, terms.values), terms.clipped | cut)
