"""A sentence at a chart whose course surprises people, where it holds for the run.

    explanation("train/loss", run)  # "Near 0 by construction: ...", or "" where it is not so

What is said follows from the settings and metrics of the run, so that none of it is a guess.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from hone.algorithms.advantages import ADVANTAGES, GROUP_ESTIMATORS
from hone.observe.run_folder import RunFolder

__all__ = ["explanation", "explanation_of_all"]

_SURROGATES = ("gmpo", "gspo", "ppo_clip")
"""Losses that are minus the mean advantage where every ratio is 1."""
_NEAR_ZERO = 0.05
"""Largest size of a loss that is called near 0."""
_ROUNDING = 1e-8
"""Largest divergence, in nats per token, that is called rounding."""
_EQUAL = 0.01
"""Largest distance of an importance ratio from 1 that is called equal."""


def explanation(metric: str, run: RunFolder) -> str:
    """What is to be said at a chart of this metric of a run; empty where nothing is."""
    explain = _EXPLANATIONS.get(metric)
    return "" if explain is None or not run.values(metric) else explain(run)


def explanation_of_all(metric: str, runs: Sequence[RunFolder]) -> str:
    """As `explanation`, of those of several runs that have the metric: what holds for all."""
    said = {explanation(metric, run) for run in runs if run.values(metric)}
    return said.pop() if len(said) == 1 else ""


def _trains_batches_once(run: RunFolder) -> bool:
    """Whether no step had more than one update, so that each ratio in the loss is 1."""
    updates = run.values("train/num_optimizer_steps")
    return run.kind == "rl" and bool(updates) and max(updates) <= 1


def _loss(run: RunFolder) -> str:
    shares = run.values("rollout/zero_spread_share")
    if shares and min(shares) == 1 and run.setting("algorithm.advantage") in GROUP_ESTIMATORS:
        return (
            "No group had samples of different rewards, so every advantage is 0 and nothing was "
            "learnt from rewards."
        )
    named = run.setting("algorithm.loss")
    losses = [*named] if isinstance(named, Mapping) else [named]
    other_terms = (
        run.setting("algorithm.entropy_coef"),
        run.setting("algorithm.kl.placement") == "loss" and run.setting("algorithm.kl.coef"),
        run.setting("teacher.path"),
        run.setting("algorithm.correction.kind") not in (None, "none"),
    )
    is_so = (
        _trains_batches_once(run)
        and all(loss in _SURROGATES for loss in losses)
        and run.setting("algorithm.advantage") in ADVANTAGES
        and not any(other_terms)
        and statistics.median(map(abs, run.values("train/loss"))) < _NEAR_ZERO
    )
    if not is_so:
        return ""
    return (
        "Near 0 by construction: each batch is trained once, so every ratio is 1 and the loss is "
        "the mean of advantages that balance out."
    )


def _clipping(run: RunFolder) -> str:
    moved = [*run.values("policy/clip_fraction"), *run.values("policy/approx_kl")]
    if any(moved) or not _trains_batches_once(run):
        return ""
    return (
        "Clipped tokens and the movement of one update are 0 because each batch is trained once: "
        "both compare with the policy before the first update of a batch."
    )


def _entropy(run: RunFolder) -> str:
    before, after = _ends(run.values("policy/entropy"))
    rewards = run.values("reward/mean")
    if not rewards or after > 0.7 * before:
        return ""
    worse, better = _ends(rewards)
    if better <= worse:
        return ""
    return (
        "Entropy falls because the policy becomes sure of its answers; the reward rises meanwhile, "
        "so it learns."
    )


def _ratio(run: RunFolder) -> str:
    names = ("off_policy/ratio/p05", "off_policy/ratio/mean", "off_policy/ratio/p95")
    ratios = [value for name in names for value in run.values(name)]
    if any(abs(ratio - 1) >= _EQUAL for ratio in ratios):
        return ""
    return (
        "1 is right here: the trainer gives each token the probability with which the engine "
        "sampled it."
    )


def _mismatch(run: RunFolder) -> str:
    if max(run.values("off_policy/mismatch_kl")) >= _ROUNDING:
        return ""
    return "Values this small are rounding: engine and trainer agree."


def _equal_rewards(run: RunFolder) -> str:
    _, share = _ends(run.values("rollout/zero_spread_share"))
    if share <= 0.5 or run.setting("algorithm.advantage") not in GROUP_ESTIMATORS:
        return ""
    return (
        "A group whose samples all have one reward trains nothing, because none of them is better "
        "than the others; at the end those are most groups."
    )


def _chosen(run: RunFolder) -> str:
    margins, chosen = run.values("rewards/margins"), run.values("logps/chosen")
    if not margins:
        return ""
    (less, more), (likely, unlikely) = _ends(margins), _ends(chosen)
    if unlikely >= likely or more <= less:
        return ""
    return (
        "The chosen answers become less likely too: what is trained is their lead over the "
        "rejected ones, which grows."
    )


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Means over the first and over the last tenth."""
    width = math.ceil(len(values) / 10)
    return statistics.fmean(values[:width]), statistics.fmean(values[-width:])


_EXPLANATIONS: Mapping[str, Callable[[RunFolder], str]] = {
    "train/loss": _loss,
    "policy/clip_fraction": _clipping,
    "policy/approx_kl": _clipping,
    "policy/entropy": _entropy,
    "off_policy/ratio/mean": _ratio,
    "off_policy/mismatch_kl": _mismatch,
    "rollout/zero_spread_share": _equal_rewards,
    "logps/chosen": _chosen,
}
