"""What an advantage estimator is given and gives, and what several of them share.

An estimator sees every valid sample of a step, group by group, and returns one float32 advantage
for each trained token. A KL penalty placed in the reward arrives as `penalties`, one value a
token, and is subtracted from the reward *before* the baseline is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "STD_EPS",
    "Advantages",
    "Groups",
    "ScoredSample",
    "centred",
    "has_spread",
    "on_tokens",
    "whiten",
]


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

STD_EPS = 1e-6


def has_spread(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards differ by more than rounding.

    Dividing by a standard deviation that is rounding noise would turn a group without any signal
    into large advantages, so such a group counts as constant and its advantages are exactly 0.
    """
    low, high = min(rewards), max(rewards)
    return high - low > 1e-7 * max(1.0, abs(low), abs(high))


def centred(group: Sequence[ScoredSample]) -> Tensor:
    """Rewards less their group mean, [G] float64; exactly 0 for a group without spread.

    A sample's penalties are taken off before the mean is, as in verl; OpenRLHF takes them off each
    token's return after it.
    """
    rewards = [sample.penalised_reward for sample in group]
    if not has_spread(rewards):
        return torch.zeros(len(rewards), dtype=torch.float64)
    values = torch.tensor(rewards, dtype=torch.float64)
    return values - values.mean()


def on_tokens(values: Tensor, group: Sequence[ScoredSample]) -> list[Tensor]:
    """One value a sample -> the same value on each of its tokens."""
    return [
        torch.full_like(sample.penalties, float(value), dtype=torch.float32)
        for value, sample in zip(values, group, strict=True)
    ]


def whiten(returns: list[list[Tensor]]) -> Advantages:
    """Normalise over all tokens of the step. Constant returns give exactly 0.

    By the standard deviation (N - 1) plus 1e-6; in verl by `sqrt(variance + 1e-8)`, in OpenRLHF by
    that of N.
    """
    flat = [tokens for group in returns for tokens in group if tokens.numel()]
    if not flat:
        return [[tokens.float() for tokens in group] for group in returns]
    values = torch.cat(flat)
    if not has_spread([float(values.min()), float(values.max())]):
        return [[torch.zeros_like(tokens).float() for tokens in group] for group in returns]
    mean, std = values.mean(), values.std()
    return [[((tokens - mean) / (std + STD_EPS)).float() for tokens in group] for group in returns]
