"""GRPO, arXiv:2402.03300: the reward normalised within its group."""

from __future__ import annotations

import torch

from hone.algorithms.advantage import STD_EPS, Advantages, Groups, centred, on_tokens


def advantages(groups: Groups) -> Advantages:
    """`(r_i - mean(r)) / (std(r) + eps)`.

    The standard deviation has Bessel's correction, as the common implementations do.
    """
    result: Advantages = []
    for group in groups:
        values = centred(group)
        std = torch.linalg.vector_norm(values) / max(len(group) - 1, 1) ** 0.5
        result.append(on_tokens(values / (std + STD_EPS), group))
    return result
