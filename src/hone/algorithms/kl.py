"""Estimators of the divergence between two policies from sampled tokens.

With `d = log p(x) - log q(x)` and x drawn from p, all three estimate KL(p || q)
(Schulman, http://joschu.net/blog/kl-approx.html). As *values* k1 and k3 are unbiased. As *losses*
their gradients differ: k1 has zero expected gradient, k2 has the gradient of the reverse KL, and
k3 that of a forward KL; see the test against the exact divergence.

The configuration takes the values of `algorithm.kl.estimator` from this file before torch is
loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KL_ESTIMATORS", "MAX_LOG_RATIO", "KLEstimator", "k1", "k2", "k3"]

KLEstimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to [-20, 20] before `exp`, so that a single token cannot overflow."""


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """`d`: unbiased, high variance, may be negative."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """`d^2 / 2`: biased in value, unbiased in gradient."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """`exp(-d) - 1 + d`: unbiased, low variance, never negative."""
    d = (logprobs - ref_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (-d).expm1() + d


KL_ESTIMATORS: Mapping[KLEstimator, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
}
