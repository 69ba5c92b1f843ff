"""RLOO, arXiv:2402.14740: the mean of the other samples as the baseline."""

from __future__ import annotations

from hone.algorithms.advantage import Advantages, Groups, centred, on_tokens


def advantages(groups: Groups) -> Advantages:
    """`r_i - mean(r_j, j != i) = G / (G - 1) * (r_i - mean(r))`."""
    return [on_tokens(centred(g) * (len(g) / max(len(g) - 1, 1)), g) for g in groups]
