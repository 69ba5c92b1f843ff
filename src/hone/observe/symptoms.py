"""Tests that recognise a symptom in the metrics of the latest steps.

A test takes a `History` and returns a `Breach` or None. A metric that a run does not have is not
tested.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

__all__ = [
    "STALE_KL",
    "Breach",
    "History",
    "Test",
    "above",
    "below",
    "either",
    "falls",
    "has_trained",
    "jumps",
    "lacks_cores",
    "leaks",
    "many_failures",
    "mean_share_above",
    "not_finite",
    "only_when",
    "share_above",
    "slow_phase",
    "stuck",
    "unlikely_duplicates",
]

HISTORY_STEPS = 128
STALE_KL = 0.01
"""Nats per token between the sampling policy and the trained one: the largest divergence that
number formats alone cause."""


class Breach(NamedTuple):
    """A measured value and the limit it broke."""

    metric: str
    value: float
    limit: float


class History:
    """Scalars of the latest steps, newest last."""

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
        """The metric's finite values over the steps that have it, or empty if the newest step lacks
        it."""
        return self.values(metric) if math.isfinite(self.now.get(metric, math.nan)) else []

    def usual(self, metric: str, num_least: int) -> float | None:
        """Median of the 20 values before the newest. None if there are fewer than `num_least`, or
        the newest step has none."""
        earlier = self.series(metric)[:-1]
        return statistics.median(earlier[-20:]) if earlier and len(earlier) >= num_least else None


Test: TypeAlias = Callable[[History], Breach | None]


def above(metric: str, limit: float, *, steps: int = 1) -> Test:
    """Test that each of the newest `steps` values exceeds the limit."""

    def test(history: History) -> Breach | None:
        newest = history.series(metric)[-steps:]
        if len(newest) == steps and min(newest) > limit:
            return Breach(metric, newest[-1], limit)
        return None

    return test


def below(metric: str, limit: float, *, steps: int = 1) -> Test:
    """Test that each of the newest `steps` values is below the limit."""

    def test(history: History) -> Breach | None:
        newest = history.series(metric)[-steps:]
        if len(newest) == steps and max(newest) < limit:
            return Breach(metric, newest[-1], limit)
        return None

    return test


def share_above(
    metric: str, whole: str, share: float, *, steps: int = 1, floor: float = 0.0
) -> Test:
    """Test that in each of the newest `steps` the metric exceeds `floor` and a share of another
    one."""

    def test(history: History) -> Breach | None:
        parts, wholes = history.series(metric)[-steps:], history.series(whole)[-steps:]
        if len(parts) < steps or len(wholes) < steps:
            return None
        limits = [max(share * total, floor) for total in wholes]
        if all(part > limit for part, limit in zip(parts, limits, strict=True)):
            return Breach(metric, parts[-1], limits[-1])
        return None

    return test


def mean_share_above(metric: str, whole: str, share: float, *, steps: int) -> Test:
    """Test that, summed over the newest `steps`, the metric exceeds a share of another one."""

    def test(history: History) -> Breach | None:
        parts, wholes = history.series(metric)[-steps:], history.series(whole)[-steps:]
        if len(parts) < steps or len(wholes) < steps or sum(parts) <= share * sum(wholes):
            return None
        return Breach(metric, statistics.fmean(parts), share * statistics.fmean(wholes))

    return test


def jumps(metric: str, factor: float, *, floor: float = 0.0, before: int = 5) -> Test:
    """Test that the newest value exceeds `floor` and `factor` times the median of the 20 values
    before. With a median and a floor of 0 nothing is a jump."""

    def test(history: History) -> Breach | None:
        usual = history.usual(metric, before)
        limit = 0.0 if usual is None else max(factor * usual, floor)
        value = history.now.get(metric, 0.0)
        return Breach(metric, value, limit) if value > limit > 0 else None

    return test


def falls(metric: str, factor: float) -> Test:
    """Test that the newest value is below `factor` times the median of the 20 values before."""

    def test(history: History) -> Breach | None:
        usual = history.usual(metric, 5)
        limit = -math.inf if usual is None else factor * usual
        value = history.now.get(metric, 0.0)
        return Breach(metric, value, limit) if value < limit else None

    return test


def either(*tests: Test) -> Test:
    """Test that returns the first breach of several tests."""

    def test(history: History) -> Breach | None:
        return next((breach for one in tests if (breach := one(history))), None)

    return test


def only_when(condition: Callable[[Mapping[str, float]], bool], test: Test) -> Test:
    """Test that is applied only to steps whose metrics meet the condition."""
    return lambda history: test(history) if condition(history.now) else None


def has_trained(now: Mapping[str, float]) -> bool:
    """Whether this step had tokens to train and a learning rate above 0, so that weights must
    move."""
    return (
        now.get("train/num_tokens", 0) > 0
        and now.get("train/lr", 1) > 0
        and now.get("rollout/zero_spread_share", 0) < 1
    )


def lacks_cores(now: Mapping[str, float]) -> bool:
    """Whether more threads want to run than there are cores, and this process gets too few cores:
    its CPU time is well below wall time x threads. Threads that wait for each other use little CPU
    time too, but then no other thread asks for the cores."""
    return now.get("perf/load_per_core", 0.0) > 1.5 and now.get("perf/cpu_share", 1.0) < 0.75


def not_finite(history: History) -> Breach | None:
    """Test that a metric is NaN or infinite."""
    for metric, value in history.now.items():
        if not math.isfinite(value):
            return Breach(metric, value, 0.0)
    return None


def many_failures(history: History) -> Breach | None:
    """Test that more than 3 % of the samples have no reward. Names the most frequent kind of
    failure."""
    failed = {key: held for key, held in history.now.items() if key.startswith("rollout/failed/")}
    total = sum(failed.values()) + history.now.get("rollout/valid", 0.0)
    if total == 0 or sum(failed.values()) / total <= 0.03:
        return None
    worst = max(failed, key=lambda key: failed[key])
    return Breach(worst, failed[worst], 0.03 * total)


def unlikely_duplicates(history: History) -> Breach | None:
    """Test that half of the answers repeat another one of their group, although chance would not do
    that: two answers of n tokens with entropy h per token coincide with a probability of about
    exp(-n h)."""
    metric, now = "rollout/duplicate_share", history.now
    nats = now.get("policy/entropy", 0.0) * now.get("rollout/completion_tokens/mean", 0.0)
    value = now.get(metric, 0.0)
    return Breach(metric, value, 0.5) if value >= 0.5 and nats > 10 else None


def stuck(metric: str, *, steps: int) -> Test:
    """Test that the value has not moved for `steps` steps, all of which trained something."""

    def test(history: History) -> Breach | None:
        newest = history.series(metric)[-steps:]
        trained = history.series("train/num_tokens")[-steps:]
        if len(newest) < steps or len(trained) < steps or min(trained) == 0:
            return None
        return Breach(metric, newest[-1], newest[0] + 1) if len(set(newest)) == 1 else None

    return test


def leaks(metric: str) -> Test:
    """Test that memory in GiB grows steadily: fast over 3 steps, or slowly along a line over many.
    The first 5 steps are ignored: they allocate memory that a run keeps."""

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


def slow_phase(history: History) -> Breach | None:
    """Test that a phase takes longer than usual by more than a whole usual step. Names the slowest
    one. Phases that many steps lack (evaluations, checkpoints) and delays below a second are
    ignored."""
    usual_step_s = history.usual("time/step_s", 5)
    num_steps = len(history.series("time/step_s"))
    found: list[tuple[float, Breach]] = []
    for metric, value in history.now.items():
        is_phase = metric.startswith("time/") and metric.count("/") == 1
        usual_s = history.usual(metric, num_steps - 2) if is_phase else None
        if metric == "time/step_s" or usual_step_s is None or usual_s is None:
            continue
        limit = usual_s + max(usual_step_s, 1.0)
        if value > limit:
            found.append((value - limit, Breach(metric, value, limit)))
    return max(found)[1] if found else None
