"""Divergences between a policy and its teacher, of each token, as losses.

Both are known at the K words that the teacher finds likeliest; all others are one more outcome, the
rest, so that these are divergences of two distributions over K + 1 outcomes: at most those over the
vocabulary, and with K = V those. `p` is the policy, `q` the teacher; the names are of the policy's
view, as in GKD (arXiv:2306.13649) and MiniLLM (arXiv:2306.08543).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

__all__ = ["DIVERGENCES"]

_LEAST = 1e-6
"""Mass of the rest where less is left of 1 than float32 can tell; it has no gradient there."""


def reverse_kl(policy: Tensor, teacher: Tensor) -> Tensor:
    """`sum p log(p / q)`: the policy gives up what the teacher does not say. [N, K] each, the
    policy's with a gradient; [N]."""
    return _kl(_with_rest(policy), _with_rest(teacher))


def forward_kl(policy: Tensor, teacher: Tensor) -> Tensor:
    """`sum q log(q / p)`, up to a constant the cross-entropy: the policy covers all that the
    teacher says."""
    return _kl(_with_rest(teacher), _with_rest(policy))


def js(policy: Tensor, teacher: Tensor) -> Tensor:
    """Jensen-Shannon: half the sum of both divergences from the mean distribution, at most
    log 2."""
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
    """[N, K + 1]: the last is that of all other words together."""
    rest = -torch.expm1(logprobs.logsumexp(-1, keepdim=True))
    return torch.cat([logprobs, rest.clamp(min=_LEAST).log()], -1)
