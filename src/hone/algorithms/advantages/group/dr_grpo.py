"""Dr.GRPO, arXiv:2503.20783: the reward centred in its group, not divided."""

from __future__ import annotations

from hone.algorithms.advantage import Advantages, Groups, centred, on_tokens


def advantages(groups: Groups) -> Advantages:
    """`r_i - mean(r)`."""
    return [on_tokens(centred(group), group) for group in groups]
