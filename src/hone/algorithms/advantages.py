"""Advantage estimators: what a sample's reward is worth against its baseline.

An estimator sees every valid sample of a step, group by group, and returns one float32 advantage
for each trained token. A KL penalty placed in the reward arrives as `penalties`, one value a
token, and is subtracted from the reward *before* the baseline is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ADVANTAGES", "ScoredSample", "has_spread"]


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A valid sample as an estimator sees it."""

    reward: float
    penalties: Tensor
    """[N] float, coefficient included; zeros without a KL penalty in the reward."""

    @property
    def penalised_reward(self) -> float:
        """The reward of the whole sequence: what it earned less what it paid."""
        return self.reward - float(self.penalties.double().sum())

    def returns(self, reward: float) -> Tensor:
        """Undiscounted return of each token, [N] float64: `reward` less the penalties to come."""
        penalties = self.penalties.double()
        return reward - penalties.flip(0).cumsum(0).flip(0)


Groups = Sequence[Sequence[ScoredSample]]
Advantages = list[list[Tensor]]

_STD_EPS = 1e-6


def has_spread(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards differ by more than rounding.

    Dividing by a standard deviation that is rounding noise would turn a group without any signal
    into large advantages, so such a group counts as constant and its advantages are exactly 0.
    """
    low, high = min(rewards), max(rewards)
    return high - low > 1e-7 * max(1.0, abs(low), abs(high))


def _centred(group: Sequence[ScoredSample]) -> Tensor:
    """Rewards less their group mean, [G] float64; exactly 0 for a group without spread."""
    rewards = [sample.penalised_reward for sample in group]
    if not has_spread(rewards):
        return torch.zeros(len(rewards), dtype=torch.float64)
    values = torch.tensor(rewards, dtype=torch.float64)
    return values - values.mean()


def _broadcast(values: Tensor, group: Sequence[ScoredSample]) -> list[Tensor]:
    """One value a sample -> the same value on each of its tokens."""
    return [
        torch.full_like(sample.penalties, float(value), dtype=torch.float32)
        for value, sample in zip(values, group, strict=True)
    ]


def grpo(groups: Groups) -> Advantages:
    """Group-normalised reward: `(r_i - mean(r)) / (std(r) + eps)`, arXiv:2402.03300.

    The standard deviation has Bessel's correction, as the common implementations do.
    """
    result: Advantages = []
    for group in groups:
        centred = _centred(group)
        std = torch.linalg.vector_norm(centred) / max(len(group) - 1, 1) ** 0.5
        result.append(_broadcast(centred / (std + _STD_EPS), group))
    return result


def dr_grpo(groups: Groups) -> Advantages:
    """Group-centred reward without the division, `r_i - mean(r)`, arXiv:2503.20783."""
    return [_broadcast(_centred(group), group) for group in groups]


def rloo(groups: Groups) -> Advantages:
    """Leave-one-out baseline, `r_i - mean(r_j, j != i) = G / (G - 1) * (r_i - mean(r))`.

    arXiv:2402.14740.
    """
    return [_broadcast(_centred(g) * (len(g) / max(len(g) - 1, 1)), g) for g in groups]


def _whiten(returns: list[list[Tensor]]) -> Advantages:
    """Normalise over all tokens of the step. Constant returns give exactly 0."""
    flat = [tokens for group in returns for tokens in group if tokens.numel()]
    if not flat:
        return [[tokens.float() for tokens in group] for group in returns]
    values = torch.cat(flat)
    if not has_spread([float(values.min()), float(values.max())]):
        return [[torch.zeros_like(tokens).float() for tokens in group] for group in returns]
    mean, std = values.mean(), values.std()
    return [[((tokens - mean) / (std + _STD_EPS)).float() for tokens in group] for group in returns]


def reinforce_pp(groups: Groups) -> Advantages:
    """REINFORCE++: token returns normalised over the whole step, arXiv:2501.03262.

    `A_t = (R_t - mean(R)) / std(R)` with `R_t = r - sum(penalties from t on)`. No group baseline.
    """
    return _whiten([[sample.returns(sample.reward) for sample in group] for group in groups])


def reinforce_pp_baseline(groups: Groups) -> Advantages:
    """REINFORCE++-baseline: group-centred rewards, then normalised over the step.

    `R_t = r_i - mean(r) - sum(penalties from t on)`, arXiv:2501.03262 (section on the baseline).
    """
    returns: list[list[Tensor]] = []
    for group in groups:
        rewards = [sample.reward for sample in group]
        mean = sum(rewards) / len(rewards)
        centred = [r - mean if has_spread(rewards) else 0.0 for r in rewards]
        returns.append([s.returns(r) for s, r in zip(group, centred, strict=True)])
    return _whiten(returns)


ADVANTAGES: dict[str, Callable[[Groups], Advantages]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
}
