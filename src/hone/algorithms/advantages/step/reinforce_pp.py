"""REINFORCE++, arXiv:2501.03262: token returns normalised over the whole step."""

from __future__ import annotations

from hone.algorithms.advantage import Advantages, Groups, whiten


def advantages(groups: Groups) -> Advantages:
    """`A_t = (R_t - mean(R)) / std(R)` with `R_t = r - sum(penalties from t on)`. No group
    baseline."""
    return whiten([[sample.returns(sample.reward) for sample in group] for group in groups])
