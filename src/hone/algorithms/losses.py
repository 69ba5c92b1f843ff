"""Policy losses: one value for each trained token.

A loss is a function here and a line of `LOSSES`; its name there is a value of `algorithm.loss`.
`ratio = exp(logprobs - old_logprobs)`, where the old log-probabilities are the trainer's own before
the update. A loss returns values, never a mean: `aggregation.py` holds the normalisation.

The configuration takes the values of `algorithm.loss` from this file and is checked before torch is
loaded. So this file calls methods of tensors, and imports torch only for types.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from hone.algorithms.corrections import importance_ratio
from hone.algorithms.sequences import sequence_mean_to_tokens

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LOSSES", "LossInputs", "LossName", "LossSettings", "LossTerms"]

LossName = Literal["cispo", "gmpo", "gspo", "ppo_clip", "sapo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The inputs of a policy loss. Tensors are float32 of shape [N] unless stated otherwise."""

    logprobs: Tensor
    """Log-probabilities of the policy being trained; they carry the gradient."""
    old_logprobs: Tensor
    advantages: Tensor
    sequence_index: Tensor  # [N] int64
    num_sequences: int


class LossSettings(Protocol):
    """The keys of `algorithm` that a policy loss may read."""

    @property
    def clip_low(self) -> float: ...
    @property
    def clip_high(self) -> float: ...
    @property
    def dual_clip(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Loss of each token and whether clipping cut its gradient."""

    values: Tensor  # [N]
    clipped: Tensor  # [N] bool


def ppo_clip(inputs: LossInputs, cfg: LossSettings) -> LossTerms:
    """PPO's clipped surrogate, arXiv:1707.06347, with an asymmetric range (DAPO, arXiv:2503.14476).

    The loss of a negative advantage is at most the dual bound `-dual_clip A` (arXiv:1912.09729).
    """
    ratio = importance_ratio(inputs.logprobs - inputs.old_logprobs)
    terms = _clipped_surrogate(ratio, inputs.advantages, cfg)
    if cfg.dual_clip is None:
        return terms
    bound = -cfg.dual_clip * inputs.advantages
    cut = (inputs.advantages < 0) & (terms.values.detach() > bound)
    return LossTerms(bound.where(cut, terms.values), terms.clipped | cut)


def gspo(inputs: LossInputs, cfg: LossSettings) -> LossTerms:
    """Group sequence policy optimisation, arXiv:2507.18071.

    PPO's surrogate with the sequence's geometric mean ratio `exp(mean_t(logprobs - old_logprobs))`
    in place of each token's. In verl the gradient of a token flows through that token alone, which
    is equal as long as all tokens of a sample have the same advantage.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    mean = sequence_mean_to_tokens(log_ratio, inputs.sequence_index, inputs.num_sequences)
    return _clipped_surrogate(importance_ratio(mean), inputs.advantages, cfg)


def gmpo(inputs: LossInputs, cfg: LossSettings) -> LossTerms:
    """GMPO, geometric-mean policy optimisation, arXiv:2507.20673.

    `-(prod_t r_t)^(1 / n) A`, the geometric mean over the n tokens of a sequence, of which PPO's
    clip has cut each before: `r_t` is at most `1 + high` where `A > 0`, else at least `1 - low`.
    A token that is cut loses its own gradient alone. The paper's range (e^-0.4, e^0.4) is wide.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    low = math.log1p(-cfg.clip_low) if cfg.clip_low < 1 else -math.inf
    from_below = log_ratio.clamp(min=low)
    kept = log_ratio.clamp(max=math.log1p(cfg.clip_high)).where(inputs.advantages > 0, from_below)
    mean = sequence_mean_to_tokens(kept, inputs.sequence_index, inputs.num_sequences)
    return LossTerms(-importance_ratio(mean) * inputs.advantages, kept != log_ratio)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, cfg: LossSettings) -> LossTerms:
    """`max(-ratio A, -clip(ratio, 1 - low, 1 + high) A)`."""
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * advantages
    return LossTerms(unclipped.maximum(clipped), clipped.detach() > unclipped.detach())


def cispo(inputs: LossInputs, cfg: LossSettings) -> LossTerms:
    """CISPO, arXiv:2506.13585: REINFORCE weighted by a clipped ratio.

    `-stop_gradient(clip(ratio, 1 - low, 1 + high)) A logprob`: no token loses its gradient.
    `clip_low >= 1` sets no lower limit, as in the paper.
    """
    ratio = importance_ratio((inputs.logprobs - inputs.old_logprobs).detach())
    weight = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    return LossTerms(-weight * inputs.advantages * inputs.logprobs, weight != ratio)


_SAPO_TAU_POSITIVE, _SAPO_TAU_NEGATIVE = 1.0, 1.05
"""Temperatures by the sign of the advantage, as in the paper: updates of negative advantages spread
over the whole vocabulary and destabilise training more."""


def sapo(inputs: LossInputs, cfg: LossSettings) -> LossTerms:
    """SAPO, soft adaptive policy optimisation, arXiv:2511.20347: a smooth gate, no clipping.

    `-4 / tau sigmoid(tau (ratio - 1)) A`, whose slope at ratio 1 is that of `-ratio A`.
    """
    del cfg
    ratio = importance_ratio(inputs.logprobs - inputs.old_logprobs)
    tau = ratio.new_full(ratio.shape, _SAPO_TAU_NEGATIVE)
    tau = tau.masked_fill(inputs.advantages > 0, _SAPO_TAU_POSITIVE)
    gate = (tau * (ratio - 1)).sigmoid() * 4 / tau
    return LossTerms(-gate * inputs.advantages, ratio.new_zeros(ratio.shape).bool())


LOSSES: Mapping[LossName, Callable[[LossInputs, LossSettings], LossTerms]] = {
    "cispo": cispo,
    "gmpo": gmpo,
    "gspo": gspo,
    "ppo_clip": ppo_clip,
    "sapo": sapo,
}
