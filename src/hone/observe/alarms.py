"""Default alarms: the symptoms that cost others days, each with what to look at.

The costly bugs of this field do not crash; they give plausible curves. Every rule below watches a
metric that is always on. A rule speaks when its symptom appears and again only after the symptom
has been gone for `QUIET_STEPS` steps.

    for alarm in alarms.check(step, scalars):
        log.event("alarm", **alarm.fields())

A metric that a run does not have is not checked.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

__all__ = ["Alarm", "Alarms"]

QUIET_STEPS = 20
HISTORY_STEPS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A metric that left its healthy range."""

    name: str
    step: int
    metric: str
    value: float
    limit: float
    advice: str
    """What it means and where to look first."""

    def __str__(self) -> str:
        return f"{self.metric} is {self.value:.4g} (limit {self.limit:.4g}). {self.advice}"

    def fields(self) -> dict[str, Any]:
        """Everything, for `Logger.event`."""
        return asdict(self)


class Breach(NamedTuple):
    """A measured value and the limit it broke."""

    metric: str
    value: float
    limit: float


class History:
    """The newest steps' scalars, newest last."""

    def __init__(self) -> None:
        self._rows: deque[Mapping[str, float]] = deque(maxlen=HISTORY_STEPS)

    def append(self, scalars: Mapping[str, float]) -> None:
        self._rows.append(scalars)

    @property
    def now(self) -> Mapping[str, float]:
        """The newest step."""
        return self._rows[-1]

    def values(self, metric: str) -> list[float]:
        """The metric's finite values over the steps that have it."""
        held = (row[metric] for row in self._rows if metric in row)
        return [value for value in held if math.isfinite(value)]

    def series(self, metric: str) -> list[float]:
        """As `values`, but empty unless the newest step has the metric."""
        return self.values(metric) if math.isfinite(self.now.get(metric, math.nan)) else []


Test: TypeAlias = Callable[[History], Breach | None]


class Rule(NamedTuple):
    """A symptom, how it is recognised, and what to tell the user."""

    name: str
    test: Test
    advice: str


class Alarms:
    """Checks every step against all rules.

    `max_mismatch_kl` is the largest healthy divergence of trainer and engine: about 1e-2 for
    bfloat16 (its floor is 1.5e-3), 1e-4 for float32.
    """

    def __init__(self, *, max_mismatch_kl: float = 1e-2) -> None:
        self._rules = _mismatch_rules(max_mismatch_kl) + _SAMPLING + _LEARNING + _MACHINE
        self._history = History()
        self._last_breach: dict[str, int] = {}

    def check(self, step: int, scalars: Mapping[str, float]) -> list[Alarm]:
        """Take in one step's metrics and return the symptoms that have newly appeared."""
        self._history.append(scalars)
        raised: list[Alarm] = []
        for rule in self._rules:
            breach = rule.test(self._history)
            if breach is None:
                continue
            last = self._last_breach.get(rule.name)
            self._last_breach[rule.name] = step
            if last is None or step - last > QUIET_STEPS:
                metric, value, limit = breach
                raised.append(
                    Alarm(
                        name=rule.name,
                        step=step,
                        metric=metric,
                        value=value,
                        limit=limit,
                        advice=rule.advice,
                    )
                )
        return raised


# -- Tests: how a symptom is recognised ----------------------------------------------------------


def above(metric: str, limit: float, *, steps: int = 1) -> Test:
    """Each of the newest `steps` values exceeds the limit."""

    def test(history: History) -> Breach | None:
        newest = history.series(metric)[-steps:]
        if len(newest) == steps and min(newest) > limit:
            return Breach(metric, newest[-1], limit)
        return None

    return test


def below(metric: str, limit: float, *, steps: int = 1) -> Test:
    """Each of the newest `steps` values is under the limit."""

    def test(history: History) -> Breach | None:
        newest = history.series(metric)[-steps:]
        if len(newest) == steps and max(newest) < limit:
            return Breach(metric, newest[-1], limit)
        return None

    return test


def jumps(metric: str, factor: float, *, floor: float = 0.0, before: int = 5) -> Test:
    """The newest value exceeds `floor` and `factor` times the median of the 20 values before.

    Against a median and a floor of 0 nothing is a jump.
    """

    def test(history: History) -> Breach | None:
        *earlier, value = history.series(metric) or [0.0]
        if len(earlier) < before:
            return None
        limit = max(factor * statistics.median(earlier[-20:]), floor)
        return Breach(metric, value, limit) if value > limit > 0 else None

    return test


def falls(metric: str, factor: float, *, before: int = 5) -> Test:
    """The newest value is under `factor` times the median of the 20 values before."""

    def test(history: History) -> Breach | None:
        *earlier, value = history.series(metric) or [0.0]
        if len(earlier) < before:
            return None
        limit = factor * statistics.median(earlier[-20:])
        return Breach(metric, value, limit) if value < limit else None

    return test


def either(*tests: Test) -> Test:
    """The first breach that one of the tests finds."""

    def test(history: History) -> Breach | None:
        return next((breach for one in tests if (breach := one(history))), None)

    return test


def only_when(condition: Callable[[Mapping[str, float]], bool], test: Test) -> Test:
    """The test, on steps whose metrics meet the condition."""
    return lambda history: test(history) if condition(history.now) else None


def not_finite(history: History) -> Breach | None:
    """A metric is NaN or infinite."""
    for metric, value in history.now.items():
        if not math.isfinite(value):
            return Breach(metric, value, 0.0)
    return None


def many_failures(history: History) -> Breach | None:
    """More than 3 % of the samples carry no reward; names the most frequent kind."""
    failed = {key: held for key, held in history.now.items() if key.startswith("rollout/failed/")}
    total = sum(failed.values()) + history.now.get("rollout/valid", 0.0)
    if total == 0 or sum(failed.values()) / total <= 0.03:
        return None
    worst = max(failed, key=lambda key: failed[key])
    return Breach(worst, failed[worst], 0.03 * total)


def unlikely_duplicates(history: History) -> Breach | None:
    """Half of the answers repeat another of their group although chance would not do that.

    Two answers of n tokens with entropy h a token coincide with probability of about exp(-n h).
    """
    metric, now = "rollout/duplicate_share", history.now
    nats = now.get("policy/entropy", 0.0) * now.get("rollout/completion_tokens/mean", 0.0)
    value = now.get(metric, 0.0)
    return Breach(metric, value, 0.5) if value >= 0.5 and nats > 10 else None


def stuck(metric: str, *, steps: int) -> Test:
    """The value has not moved for `steps` steps, all of which trained something."""

    def test(history: History) -> Breach | None:
        newest = history.series(metric)[-steps:]
        trained = history.series("train/num_tokens")[-steps:]
        if len(newest) < steps or len(trained) < steps or min(trained) == 0:
            return None
        return Breach(metric, newest[-1], newest[0] + 1) if len(set(newest)) == 1 else None

    return test


def leaks(metric: str) -> Test:
    """Memory in GiB grows steadily: fast over 3 steps, or slowly along a line over many.

    The first 5 steps allocate what a run keeps and are not judged.
    """

    def test(history: History) -> Breach | None:
        values = history.series(metric)[5:]
        if len(values) >= 4:
            growth = np.diff(values[-4:])
            limit = max(0.0625, 0.01 * values[-4])
            if growth.min() > limit:
                return Breach(metric, values[-1], values[-4] + limit)
        if len(values) >= 60:
            steps = np.arange(len(values))
            slope, start = np.polyfit(steps, values, 1)
            rise, spread = slope * len(values), np.std(values - (slope * steps + start))
            if rise > max(0.1, 0.02 * start) and rise > 10 * spread:
                return Breach(metric, values[-1], float(start))
        return None

    return test


def unattributed(history: History) -> Breach | None:
    """More than 5 % of a step's time belongs to no phase, two steps running."""
    rests, steps = history.series("time/unattributed_s")[-2:], history.series("time/step_s")[-2:]
    if len(rests) < 2 or len(steps) < 2:
        return None
    if all(rest > max(0.05 * step, 0.02) for rest, step in zip(rests, steps, strict=True)):
        return Breach("time/unattributed_s", rests[-1], 0.05 * steps[-1])
    return None


def slow_phase(history: History) -> Breach | None:
    """A phase takes longer than usual by more than a whole usual step; names the worst one.

    Evaluations and checkpoints come and go: phases that many steps lack are not judged. Delays
    under a second are the machine's own.
    """
    *usual_steps, _ = history.series("time/step_s") or [0.0]
    if len(usual_steps) < 5:
        return None
    usual_step_s = max(statistics.median(usual_steps[-20:]), 1.0)
    found: list[tuple[float, Breach]] = []
    for metric in history.now:
        *earlier, value = history.series(metric) or [0.0]
        is_phase = metric.startswith("time/") and metric.count("/") == 1
        if not is_phase or metric == "time/step_s" or len(earlier) < len(usual_steps) - 1:
            continue
        limit = statistics.median(earlier[-20:]) + usual_step_s
        if value > limit:
            found.append((value - limit, Breach(metric, value, limit)))
    return max(found)[1] if found else None


# -- Rules: what is watched by default -----------------------------------------------------------


def _mismatch_rules(max_kl: float) -> tuple[Rule, ...]:
    kl = "off_policy/mismatch_kl"
    return (
        Rule(
            "mismatch_kl",
            above(kl, max_kl),
            "Engine and trainer disagree on the same tokens: check the weight sync, rope and "
            "scaling settings, temperature, and number formats before any correction.",
        ),
        Rule(
            "mismatch_kl_growing",
            jumps(kl, 5.0, floor=max_kl / 10, before=3),
            "The gap between engine and trainer jumped: a sync may have left out or damaged a "
            "tensor since, or stale keys and values are being read.",
        ),
        Rule(
            "ratio_mean",
            either(above("off_policy/ratio/mean", 1.03), below("off_policy/ratio/mean", 0.97)),
            "The mean ratio of trainer to engine must be 1: the engine samples from another "
            "distribution (truncation, penalties, temperature) or holds other weights.",
        ),
        Rule(
            "stuck_version",
            stuck("rollout/weight_version/max", steps=3),
            "The policy is trained, but samples still come from the same weight version: weights "
            "do not reach the engine.",
        ),
    )


_SAMPLING = (
    Rule(
        "failed_samples",
        many_failures,
        "Samples fail instead of being scored: see `failure_detail` in samples.jsonl.",
    ),
    Rule(
        "no_valid_samples",
        below("rollout/valid", 0.5),
        "No sample of the step could be used: see `failure` in samples.jsonl.",
    ),
    Rule(
        "zero_spread",
        above("rollout/zero_spread_share", 0.95, steps=2),
        "Nearly all groups earn one and the same reward, so there is nothing to learn from: the "
        "task is too hard, too easy, or the reward does not read the answers.",
    ),
    Rule(
        "truncated",
        above("rollout/truncated_share", 0.5, steps=2),
        "Most samples hit the length limit: raise rollout.max_completion_tokens, or check that "
        "the model's end-of-sequence ids and chat template are right.",
    ),
    Rule(
        "duplicates",
        unlikely_duplicates,
        "Answers within a group repeat each other far beyond chance: the samples of a group may "
        "share a seed, or the engine samples greedily.",
    ),
)


def has_trained(now: Mapping[str, float]) -> bool:
    """Whether this step's metrics show a reason and a rate for the weights to move."""
    return (
        now.get("train/num_tokens", 0) > 0
        and now.get("train/lr", 1) > 0
        and now.get("rollout/zero_spread_share", 0) < 1
    )


_LEARNING = (
    Rule(
        "not_finite",
        not_finite,
        "A number is not finite: look at the rewards, the learning rate and the log-probabilities "
        "of this step in samples.jsonl.",
    ),
    Rule(
        "entropy_collapse",
        either(below("policy/entropy", 0.005, steps=2), falls("policy/entropy", 0.1)),
        "The policy has all but stopped exploring: lower the learning rate, raise "
        "algorithm.clip_high, or check for an answer the reward is fooled by.",
    ),
    Rule(
        "entropy_explosion",
        jumps("policy/entropy", 3.0, floor=1.0),
        "The policy is turning to noise: the learning rate is too high or the gradient is wrong.",
    ),
    Rule(
        "clip_fraction",
        above("policy/clip_fraction", 0.4, steps=2),
        "Most of the update is clipped away: fewer epochs or optimizer steps per rollout, or a "
        "lower learning rate.",
    ),
    Rule(
        "grad_norm_spike",
        jumps("train/grad_norm", 10.0),
        "The gradient is ten times its usual size: look at the samples and advantages of this "
        "step; a lower learning rate or optimizer.max_grad_norm bounds the damage.",
    ),
    Rule(
        "grad_norm_zero",
        only_when(has_trained, below("train/grad_norm", 1e-12)),
        "Tokens were trained and rewards differ, but the gradient is zero: check loss masks, "
        "advantages and frozen parameters.",
    ),
    Rule(
        "weights_unchanged",
        only_when(has_trained, above("train/share_unchanged", 0.9999, steps=2)),
        "The optimizer steps, but the weights keep their values: the learning rate is too small "
        "for the number format, or updates are not written back.",
    ),
    Rule(
        "large_update",
        above("train/update_to_weight_ratio", 0.1),
        "One step changed the weights by more than a tenth: the learning rate is too high.",
    ),
    Rule(
        "skipped_steps",
        above("train/num_skipped_steps", 0),
        "Optimizer steps were skipped because no token was left to train on.",
    ),
)

_MACHINE = (
    Rule(
        "host_memory",
        leaks("mem/rss_gib"),
        "Host memory keeps growing: something holds on to samples, tensors or worker results.",
    ),
    Rule(
        "unattributed_time",
        unattributed,
        "Time goes to something that no phase names: wrap it in a span, or look for garbage "
        "collection and waiting workers.",
    ),
    Rule(
        "slow_phase",
        slow_phase,
        "This phase suddenly takes far longer than before: look at trace.json of the step, other "
        "load on the machine, and the scoring workers.",
    ),
)
