"""Advantages, losses, weights of tokens and learning rates in float64, for the replay of runs.

Written from the documentation of the settings and the papers that it names, without the product's
code. Tensors have one value for each trained token of a sequence, unless stated otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "FEWEST",
    "advantages_of_groups",
    "correction",
    "divergence",
    "gae",
    "lr_scale",
    "policy_loss",
    "token_weights",
    "whitened",
]

Settings = Mapping[str, Any]

FEWEST = {"grpo": 2, "dr_grpo": 2, "rloo": 2, "reinforce_pp_baseline": 2}
"""Samples that a group needs for a baseline, where it needs more than one."""
_MAX_LOG_RATIO = 20.0
_EPS = 1e-6
_SAME = 1e-7
"""Rewards that differ by less, relative to the largest, have no spread."""


def advantages_of_groups(
    name: str, groups: Sequence[Sequence[tuple[float, Tensor]]]
) -> list[list[Tensor]]:
    """Advantages of samples, which are a reward and what each token pays for its divergence."""
    found: list[list[Tensor]] = []
    for group in groups:
        rewards = torch.tensor([reward for reward, _ in group], dtype=torch.float64)
        paid = torch.stack([cost.sum() for _, cost in group])
        if name in ("grpo", "dr_grpo", "rloo"):
            scores = _centred(rewards - paid)
            if name == "grpo":
                scores = scores / ((scores.square().sum() / (len(group) - 1)).sqrt() + _EPS)
            elif name == "rloo":
                scores = scores * len(group) / (len(group) - 1)
            found.append(
                [score.expand(len(cost)) for score, (_, cost) in zip(scores, group, strict=True)]
            )
        else:
            scores = _centred(rewards) if name == "reinforce_pp_baseline" else rewards
            found.append(
                [score - _to_come(cost) for score, (_, cost) in zip(scores, group, strict=True)]
            )
    return whitened(found) if name in ("reinforce_pp", "reinforce_pp_baseline") else found


def gae(reward: float, paid: Tensor, values: Tensor, *, gamma: float, lam: float) -> Tensor:
    """The sum of the errors of the values that follow, each `gamma lam` times as much as the one
    before it. The reward is earned at the last token, behind which nothing has a value."""
    number = len(values)
    rewards = -paid.clone()
    rewards[-1:] += reward
    after = torch.cat([values[1:], values.new_zeros(1)])[:number]
    errors = rewards + gamma * after - values
    powers = (gamma * lam) ** torch.arange(number, dtype=torch.float64)
    return torch.stack([(powers[: number - t] * errors[t:]).sum() for t in range(number)])


def whitened(groups: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Less the mean over all tokens of the step, over their standard deviation."""
    values = torch.cat([one for group in groups for one in group])
    if not len(values) or not _has_spread(values):
        return [[torch.zeros_like(one) for one in group] for group in groups]
    return [[(one - values.mean()) / (values.std() + _EPS) for one in group] for group in groups]


def policy_loss(
    cfg: Settings, logprobs: Tensor, before: Tensor, advantages: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss of each token, and whether it is cut."""
    low, high = 1 - cfg["clip_low"], 1 + cfg["clip_high"]
    log_ratio = logprobs - before
    ratio = _exp(log_ratio)
    match cfg["loss"]:
        case "ppo_clip":
            terms, cut = _surrogate(ratio, advantages, low, high)
            if cfg["dual_clip"] is not None:
                bound = torch.where(advantages < 0, -cfg["dual_clip"] * advantages, math.inf)
                terms, cut = torch.minimum(terms, bound), cut | (terms > bound)
            return terms, cut
        case "gspo":
            return _surrogate(_exp(log_ratio.mean()).expand_as(ratio), advantages, low, high)
        case "gmpo":
            most = torch.where(advantages > 0, math.log(high), math.inf)
            least = torch.where(advantages > 0, -math.inf, math.log(low))
            kept = torch.minimum(torch.maximum(log_ratio, least), most)
            return -_exp(kept.mean()) * advantages, kept != log_ratio
        case "cispo":
            weight = ratio.detach().clamp(low, high)
            return -weight * advantages * logprobs, weight != ratio
        case "sapo":
            tau = torch.where(advantages > 0, 1.0, 1.05).double()
            gate = 4 / tau * (tau * (ratio - 1)).sigmoid()
            return -gate * advantages, torch.zeros_like(ratio, dtype=torch.bool)
        case other:
            raise ValueError(f"there is no formula of the loss {other!r}")


def correction(cfg: Settings, log_ratio: Tensor) -> Tensor:
    """Factors for what another policy has drawn than the trainer's, by the logarithm of the ratio
    between both."""
    ratio = _exp(log_ratio)
    match cfg["kind"]:
        case "none":
            return torch.ones_like(ratio)
        case "tis":
            return ratio.clamp(max=cfg["high"])
        case "icepop":
            is_near = (ratio >= cfg["low"]) & (ratio <= cfg["high"])
            return torch.where(is_near, ratio, 0.0)
        case "sequence_mask":
            is_near = cfg["low"] <= float(log_ratio.mean().exp()) <= cfg["high"]
            return torch.full_like(ratio, float(is_near))
        case other:
            raise ValueError(f"there is no formula of the correction {other!r}")


def divergence(estimator: str, logprobs: Tensor, reference: Tensor) -> Tensor:
    apart = logprobs - reference
    match estimator:
        case "k1":
            return apart
        case "k2":
            return apart.square() / 2
        case "k3":
            return (-apart).exp() - 1 + apart
        case other:
            raise ValueError(f"there is no formula of the estimator {other!r}")


def token_weights(name: str, sizes: Sequence[int], longest: int) -> list[float]:
    """The weight of each trained token of sequences with so many of them, in an optimizer step."""
    number = sum(1 for size in sizes if size)
    match name:
        case "token_mean":
            return [1 / sum(sizes) if size else 0.0 for size in sizes]
        case "sequence_mean":
            return [1 / (number * size) if size else 0.0 for size in sizes]
        case "constant":
            return [1 / (number * longest) if size else 0.0 for size in sizes]
        case other:
            raise ValueError(f"there is no formula of the aggregation {other!r}")


def lr_scale(cfg: Settings, step: int, total_steps: int) -> float:
    """Factor on the peak rate in an optimizer step, counted from 0."""
    warmup, low = cfg["warmup_steps"], cfg["min_lr_ratio"]
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
    match cfg["schedule"]:
        case "constant":
            return 1.0
        case "linear":
            return low + (1 - low) * (1 - done)
        case "cosine":
            return low + (1 - low) * (1 + math.cos(math.pi * done)) / 2
        case other:
            raise ValueError(f"there is no formula of the schedule {other!r}")


def _surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    plain, cut = -ratio * advantages, -ratio.clamp(low, high) * advantages
    return torch.maximum(plain, cut), cut > plain


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _to_come(cost: Tensor) -> Tensor:
    """What each token and those behind it pay."""
    return cost.sum() - cost.cumsum(0) + cost


def _has_spread(values: Tensor) -> bool:
    low, high = float(values.min()), float(values.max())
    return high - low > _SAME * max(1.0, abs(low), abs(high))


def _centred(rewards: Tensor) -> Tensor:
    return rewards - rewards.mean() if _has_spread(rewards) else torch.zeros_like(rewards)
