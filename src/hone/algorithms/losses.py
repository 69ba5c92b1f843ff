"""Policy losses: one value for each trained token.

`ratio = exp(logprobs - old_logprobs)`, where the old log-probabilities are the trainer's own
before the update. A loss returns values, never a mean: `aggregation.py` holds the normalisation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hone.algorithms.corrections import importance_ratio
from hone.algorithms.sequences import sequence_mean_to_tokens
from hone.config.algorithm import AlgorithmConfig

__all__ = ["LOSSES", "LossInputs", "LossTerms"]


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


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, cfg: AlgorithmConfig) -> LossTerms:
    """`max(-ratio A, -clip(ratio, 1 - low, 1 + high) A)`."""
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * advantages
    return LossTerms(torch.maximum(unclipped, clipped), clipped.detach() > unclipped.detach())


def ppo_clip(inputs: LossInputs, cfg: AlgorithmConfig) -> LossTerms:
    """PPO's clipped surrogate (arXiv:1707.06347) with an asymmetric range (DAPO,
    arXiv:2503.14476) and, for negative advantages, the dual bound `-dual_clip A`
    (arXiv:1912.09729)."""
    ratio = importance_ratio(inputs.logprobs - inputs.old_logprobs)
    terms = _clipped_surrogate(ratio, inputs.advantages, cfg)
    if cfg.dual_clip is None:
        return terms
    bound = -cfg.dual_clip * inputs.advantages
    cut = (inputs.advantages < 0) & (terms.values.detach() > bound)
    return LossTerms(torch.where(cut, bound, terms.values), terms.clipped | cut)


def gspo(inputs: LossInputs, cfg: AlgorithmConfig) -> LossTerms:
    """Group sequence policy optimisation, arXiv:2507.18071: PPO's surrogate with the sequence's
    geometric mean ratio `exp(mean_t(logprobs - old_logprobs))` in place of each token's."""
    log_ratio = inputs.logprobs - inputs.old_logprobs
    mean = sequence_mean_to_tokens(log_ratio, inputs.sequence_index, inputs.num_sequences)
    return _clipped_surrogate(importance_ratio(mean), inputs.advantages, cfg)


def cispo(inputs: LossInputs, cfg: AlgorithmConfig) -> LossTerms:
    """CISPO, arXiv:2506.13585: `-stop_gradient(clip(ratio, 1 - low, 1 + high)) A logprob`. The
    clipped ratio weighs REINFORCE, so no token loses its gradient. `clip_low >= 1` sets no lower
    limit, as in the paper."""
    ratio = importance_ratio((inputs.logprobs - inputs.old_logprobs).detach())
    weight = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    return LossTerms(-weight * inputs.advantages * inputs.logprobs, weight != ratio)


LOSSES: dict[str, Callable[[LossInputs, AlgorithmConfig], LossTerms]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
}
