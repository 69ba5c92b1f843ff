"""Explains why a step has no token to train.

Such a step changes nothing: its metrics look calm, and the run would go on to its end as if it
learnt. The cause can be read from the groups and the configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hone.algorithms.advantages import GROUP_ESTIMATORS
from hone.config.tree import RLConfig
from hone.rewards.scorer import describe_failures
from hone.rollout.counts import RolloutCounts
from hone.types import Group, Row, Sample

__all__ = ["Untrained", "is_stalled", "why_untrained"]

_MAX_STEPS = 3
"""Consecutive untrained steps that end a run if the configuration is the cause. Such causes recur,
and each step costs the time of a whole rollout."""
_MAX_CHANCE_STEPS = 10
"""Consecutive untrained steps that end a run if the cause may be chance. A weak model that solves
one prompt in hundreds has steps in which every group is dropped, and learns from the others."""


@dataclass(frozen=True, slots=True)
class Untrained:
    """Why a step has no token to train."""

    cause: str
    may_be_chance: bool = False
    """Whether the next step may train without any change."""


def is_stalled(steps: Sequence[Untrained]) -> bool:
    """Whether a run must end after `steps` in a row without a trained token."""
    last = steps[-_MAX_STEPS:]
    recurs = len(last) == _MAX_STEPS and not any(step.may_be_chance for step in last)
    return recurs or len(steps) >= _MAX_CHANCE_STEPS


def why_untrained(
    cfg: RLConfig,
    groups: Sequence[Group],
    rows: Sequence[Row],
    counts: RolloutCounts,
    *,
    correction: float | None = None,
) -> Untrained | None:
    """The reason why a step of these groups trained nothing, or None if it trained. `rows` were
    made of the groups.

    `correction` is the mean factor of `algorithm.correction` over the tokens, None without one.
    """
    if any(row.num_trained for row in rows):
        return Untrained(_all_corrected_away(cfg)) if correction == 0 else None
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        return Untrained(_all_dropped(counts), may_be_chance=True)
    return Untrained(_without_tokens(cfg, samples, rows))


def _without_tokens(cfg: RLConfig, samples: Sequence[Sample], rows: Sequence[Row]) -> str:
    valid = [sample for sample in samples if sample.valid]
    if not valid:
        return f"None of {len(samples)} samples has a reward: {describe_failures(samples)}."
    if not rows and cfg.algorithm.advantage in GROUP_ESTIMATORS:
        has_failed = len(valid) < len(samples)
        failures = f": {describe_failures(samples)}" if has_failed else ""
        return (
            f"algorithm.advantage {cfg.algorithm.advantage} compares the samples of a prompt, and "
            f"no group has two with a reward{failures}."
        )
    if cfg.rollout.truncated_samples == "mask" and all(sample.truncated for sample in valid):
        return (
            f"rollout.truncated_samples is mask, and all {len(valid)} samples were cut at "
            f"rollout.max_completion_tokens {cfg.rollout.max_completion_tokens}: raise it, set "
            "rollout.truncated_samples to train, or check that the model's end-of-sequence ids and "
            "chat template are right."
        )
    return f"The loss masks of all {len(valid)} samples leave out every token."


def _all_corrected_away(cfg: RLConfig) -> str:
    correction = cfg.algorithm.correction
    return (
        f"algorithm.correction.kind {correction.kind} drops every token: no ratio of trainer to "
        f"engine lies within algorithm.correction.low {correction.low:g} and "
        f"algorithm.correction.high {correction.high:g}. Engine and trainer disagree, or samples "
        "are too old: see off_policy/kl."
    )


def _all_dropped(counts: RolloutCounts) -> str:
    failed = ""
    if counts.num_dropped_failures:
        failed = f" ({counts.num_dropped_failures} of their samples failed)"
    return (
        f"rollout.dynamic_sampling dropped all {counts.num_dropped_groups} groups of "
        f"{counts.num_refill_rounds + 1} rounds: in none did two samples earn different "
        f"rewards{failed}. The task is too hard or too easy for the model, or the reward does not "
        "read the answers."
    )
