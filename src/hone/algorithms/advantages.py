"""Advantage estimators: one value for each trained token of a step.

An estimator is a function here and a line of `ADVANTAGES`; its name there is a value of
`algorithm.advantage`. It sees every valid sample of a step, group by group, and returns one float32
advantage for each trained token. A KL penalty placed in the reward arrives as `penalties`, one
value a token, and is subtracted from the reward *before* the baseline is taken.

The configuration takes the values of `algorithm.advantage` from this file and is checked before
torch is loaded. So this file calls methods of tensors, and imports torch only for types and inside
one function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ADVANTAGES",
    "GROUP_ESTIMATORS",
    "AdvantageName",
    "Advantages",
    "Estimator",
    "Groups",
    "ScoredSample",
    "gae",
    "has_spread",
    "whiten",
]

EstimatorName = Literal["dr_grpo", "grpo", "reinforce_pp", "reinforce_pp_baseline", "rloo"]
"""Estimators that take their baseline from the rewards of samples; `gae` takes it from a critic."""

AdvantageName = Literal[EstimatorName, "gae"]


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A valid sample as an estimator sees it."""

    reward: float
    penalties: Tensor
    """[N] float, coefficient included; zeros without a KL penalty in the reward."""

    @property
    def penalised_reward(self) -> float:
        """The reward of the whole sequence less all of its KL penalties."""
        return self.reward - float(self.penalties.double().sum())

    def returns(self, reward: float) -> Tensor:
        """Undiscounted return of each token, [N] float64: `reward` less the penalties to come."""
        penalties = self.penalties.double()
        return reward - penalties.flip(0).cumsum(0).flip(0)


Groups = Sequence[Sequence[ScoredSample]]
Advantages: TypeAlias = "list[list[Tensor]]"

_STD_EPS = 1e-6


def grpo(groups: Groups) -> Advantages:
    """GRPO, arXiv:2402.03300: the reward normalised within its group.

    `(r_i - mean(r)) / (std(r) + eps)`. The standard deviation has Bessel's correction, as in the
    common implementations.
    """
    result: Advantages = []
    for group in groups:
        values = _centred(group)
        std = values.norm() / max(len(group) - 1, 1) ** 0.5
        result.append(_on_tokens(values / (std + _STD_EPS), group))
    return result


def dr_grpo(groups: Groups) -> Advantages:
    """Dr.GRPO, arXiv:2503.20783: the reward centred in its group, not divided.

    `r_i - mean(r)`.
    """
    return [_on_tokens(_centred(group), group) for group in groups]


def rloo(groups: Groups) -> Advantages:
    """RLOO, arXiv:2402.14740: the mean of the other samples as the baseline.

    `r_i - mean(r_j, j != i) = G / (G - 1) * (r_i - mean(r))`.
    """
    return [_on_tokens(_centred(g) * (len(g) / max(len(g) - 1, 1)), g) for g in groups]


def reinforce_pp(groups: Groups) -> Advantages:
    """REINFORCE++, arXiv:2501.03262: token returns normalised over the whole step.

    `A_t = (R_t - mean(R)) / std(R)` with `R_t = r - sum(penalties from t on)`. No group baseline.
    """
    return whiten([[sample.returns(sample.reward) for sample in group] for group in groups])


def reinforce_pp_baseline(groups: Groups) -> Advantages:
    """REINFORCE++-baseline, arXiv:2501.03262 (section on the baseline).

    Rewards are centred in their group, and returns then normalised over the step.
    `R_t = r_i - mean(r) - sum(penalties from t on)`, as in OpenRLHF; verl first subtracts all
    penalties of a sample from its reward.
    """
    returns: list[list[Tensor]] = []
    for group in groups:
        rewards = [sample.reward for sample in group]
        mean = sum(rewards) / len(rewards)
        centred = [r - mean if has_spread(rewards) else 0.0 for r in rewards]
        returns.append([s.returns(r) for s, r in zip(group, centred, strict=True)])
    return whiten(returns)


def gae(rewards: Tensor, values: Tensor, *, gamma: float, lam: float) -> Tensor:
    """Generalised advantage estimation, arXiv:1506.02438, of one sample against a critic's values.

    `A_t = d_t + gamma lam A_t+1` with `d_t = r_t + gamma V_t+1 - V_t`, [N] float64, over the N
    tokens that the policy sampled. `rewards` and `values` are [N] float64; `values[t]` is the
    critic's estimate before token t is sampled. The value after the last token is 0, also where the
    sample was truncated: it is not bootstrapped.
    """
    result: list[float] = []
    advantage = next_value = 0.0
    for reward, value in zip(reversed(rewards.tolist()), reversed(values.tolist()), strict=True):
        advantage = reward + gamma * next_value - value + gamma * lam * advantage
        next_value = value
        result.append(advantage)
    return values.double().new_tensor(result[::-1])


@dataclass(frozen=True, slots=True)
class Estimator:
    """An advantage estimator and the samples over which it takes the baseline."""

    estimate: Callable[[Groups], Advantages]
    baseline: Literal["group", "step"]
    """`group`: the samples of one prompt, at least two; `step`: all samples of the step."""


ADVANTAGES: Mapping[EstimatorName, Estimator] = {
    "dr_grpo": Estimator(dr_grpo, baseline="group"),
    "grpo": Estimator(grpo, baseline="group"),
    "reinforce_pp": Estimator(reinforce_pp, baseline="step"),
    "reinforce_pp_baseline": Estimator(reinforce_pp_baseline, baseline="group"),
    "rloo": Estimator(rloo, baseline="group"),
}
"""Estimators by name. `gae` is not among them, since it needs a critic: `ppo.py` calls it."""

GROUP_ESTIMATORS: frozenset[AdvantageName] = frozenset(
    name for name, estimator in ADVANTAGES.items() if estimator.baseline == "group"
)
"""Estimators that need at least two samples in each group."""


def has_spread(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards differ by more than rounding.

    Dividing by a standard deviation that is rounding noise would turn a group without any signal
    into large advantages, so such a group counts as constant and its advantages are exactly 0.
    """
    low, high = min(rewards), max(rewards)
    return high - low > 1e-7 * max(1.0, abs(low), abs(high))


def _centred(group: Sequence[ScoredSample]) -> Tensor:
    """Rewards less their group mean, [G] float64; exactly 0 for a group without spread.

    Penalties are subtracted before the mean is taken, as in verl; OpenRLHF subtracts them from each
    token's return afterwards.
    """
    rewards = [sample.penalised_reward for sample in group]
    values = group[0].penalties.double().new_tensor(rewards)
    return values - values.mean() if has_spread(rewards) else values.new_zeros(len(rewards))


def _on_tokens(values: Tensor, group: Sequence[ScoredSample]) -> list[Tensor]:
    """The value of each sample, given to each of its tokens as float32."""
    return [
        sample.penalties.new_full(sample.penalties.shape, float(value)).float()
        for value, sample in zip(values, group, strict=True)
    ]


def whiten(returns: list[list[Tensor]]) -> Advantages:
    """Normalise over all tokens of the step. Constant returns give exactly 0.

    The divisor is the standard deviation (with N - 1) plus 1e-6. verl divides by
    `sqrt(variance + 1e-8)`, OpenRLHF by the standard deviation with N.
    """
    import torch  # not at the top: checking a configuration must not load torch

    flat = [tokens for group in returns for tokens in group if tokens.numel()]
    if not flat:
        return [[tokens.float() for tokens in group] for group in returns]
    values = torch.cat(flat)
    if not has_spread([float(values.min()), float(values.max())]):
        return [[torch.zeros_like(tokens).float() for tokens in group] for group in returns]
    mean, std = values.mean(), values.std()
    return [[((tokens - mean) / (std + _STD_EPS)).float() for tokens in group] for group in returns]
