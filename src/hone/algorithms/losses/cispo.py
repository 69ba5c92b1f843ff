"""CISPO, arXiv:2506.13585: REINFORCE weighted by a clipped ratio."""

from __future__ import annotations

from hone.algorithms.corrections import importance_ratio
from hone.algorithms.policy_loss import LossInputs, LossTerms
from hone.config.algorithm import AlgorithmConfig


def loss(inputs: LossInputs, cfg: AlgorithmConfig) -> LossTerms:
    """`-stop_gradient(clip(ratio, 1 - low, 1 + high)) A logprob`: no token loses its gradient.
    `clip_low >= 1` sets no lower limit, as in the paper."""
    ratio = importance_ratio((inputs.logprobs - inputs.old_logprobs).detach())
    weight = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    return LossTerms(-weight * inputs.advantages * inputs.logprobs, weight != ratio)
