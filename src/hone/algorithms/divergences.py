"""Divergences between a policy and its teacher at each token, as losses.

Both distributions are known at the K tokens that the teacher finds likeliest. All other tokens
count as one more outcome, so these are divergences over K + 1 outcomes: never larger than the
divergence over the vocabulary, and equal to it for K = V. `p` is the policy, `q` the teacher;
"reverse" and "forward" are meant as in GKD (arXiv:2306.13649) and MiniLLM (arXiv:2306.08543).

Each function takes log-probabilities [N, K], those of the policy with a gradient, and returns [N].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

__all__ = ["DIVERGENCES"]

_MIN_REST = 1e-6
"""Least mass of the other V - K tokens: float32 cannot resolve a smaller rest of 1. A rest at this
bound has no gradient."""


def reverse_kl(policy: Tensor, teacher: Tensor) -> Tensor:
    """`sum p log(p / q)`: mode-seeking, the policy drops what is unlikely for the teacher."""
    return _kl(_with_rest(policy), _with_rest(teacher))


def forward_kl(policy: Tensor, teacher: Tensor) -> Tensor:
    """`sum q log(q / p)`, the cross-entropy up to a constant: mode-covering, the policy covers what
    is likely for the teacher."""
    return _kl(_with_rest(teacher), _with_rest(policy))


def js(policy: Tensor, teacher: Tensor) -> Tensor:
    """Jensen-Shannon: the mean of both divergences from the mean distribution, at most log 2."""
    p, q = _with_rest(policy), _with_rest(teacher)
    mean = torch.logaddexp(p, q) - math.log(2)
    return (_kl(p, mean) + _kl(q, mean)) / 2


DIVERGENCES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "js": js,
}


def _kl(left: Tensor, right: Tensor) -> Tensor:
    return (left.exp() * (left - right)).sum(-1)


def _with_rest(logprobs: Tensor) -> Tensor:
    """[N, K + 1]: the last log-probability is that of all other tokens together."""
    rest = -torch.expm1(logprobs.logsumexp(-1, keepdim=True))
    return torch.cat([logprobs, rest.clamp(min=_MIN_REST).log()], -1)
