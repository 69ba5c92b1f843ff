"""REINFORCE++-baseline, arXiv:2501.03262 (section on the baseline)."""

from __future__ import annotations

from torch import Tensor

from hone.algorithms.advantage import Advantages, Groups, has_spread, whiten


def advantages(groups: Groups) -> Advantages:
    """Group-centred rewards, then normalised over the step.

    `R_t = r_i - mean(r) - sum(penalties from t on)`, as in OpenRLHF; in verl all penalties of a
    sample are taken off its reward first.
    """
    returns: list[list[Tensor]] = []
    for group in groups:
        rewards = [sample.reward for sample in group]
        mean = sum(rewards) / len(rewards)
        centred = [r - mean if has_spread(rewards) else 0.0 for r in rewards]
        returns.append([s.returns(r) for s, r in zip(group, centred, strict=True)])
    return whiten(returns)
