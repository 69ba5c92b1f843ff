"""A failed sample is counted by kind, has no reward, and too many of them stop the run."""

import random

import pytest

from hone.rewards.score import Verdict
from hone.rewards.scorer import FailureRateError, Scorer, check_failure_rate
from hone.rewards.settings import RewardConfig
from hone.types import FailureKind, Reward
from tests.rewards.scoring import make_sample, misbehaving_scorer, plant

INJECTED = {
    FailureKind.TIMEOUT: "sleep",
    FailureKind.OUT_OF_MEMORY: "allocate",
    FailureKind.CRASH: "segfault",
    FailureKind.EXCEPTION: "raise",
    FailureKind.INVALID: "nan",
}


def score_with_injections(num_samples=100, rate=0.05):
    """A batch in random order in which each kind of failure has its share."""
    count = int(num_samples * rate)
    texts = [text for text in INJECTED.values() for _ in range(count)]
    texts += ["good"] * (num_samples - len(texts))
    random.Random(7).shuffle(texts)
    # The counts below are exact, so a crash must not look like a timeout because a core stalled.
    # Workers that sleep need no core, and as many of them do so at a time.
    with misbehaving_scorer(timeout_s=3.0, num_workers=6) as scorer:
        samples = scorer.score([make_sample(text, index=i) for i, text in enumerate(texts)])
        return samples, scorer.stats(), count


def check_failures_are_exact(samples, stats, count):
    assert dict(stats.num_failed) == dict.fromkeys(INJECTED, count)
    assert stats.num_scored == len(samples) - count * len(INJECTED)
    assert stats.num_pending == 0
    # A machine that stalls may find a worker overdue that has just delivered.
    assert stats.num_kills >= count
    for sample in samples:
        expected = next((kind for kind, text in INJECTED.items() if text == sample.text), None)
        assert sample.failure is expected, sample.failure_detail
        assert (sample.reward is None) == (expected is not None)
        assert sample.valid == (expected is None)
        assert bool(sample.failure_detail) == (expected is not None)


def test_R12_counters_equal_injections():
    check_failures_are_exact(*score_with_injections())


def failures_become_zero(finish):
    def mutant(self, sample, verdict):
        finish(self, sample, verdict)
        if sample.failure is not None:
            sample.failure, sample.reward = None, Reward(total=0.0)

    return mutant


def failures_keep_a_reward(finish):
    def mutant(self, sample, verdict):
        finish(self, sample, verdict)
        sample.reward = sample.reward or Reward(total=0.0)

    return mutant


def timeouts_count_as_crashes(finish):
    def mutant(self, sample, verdict):
        finish(self, sample, verdict)
        if self._num_failed.pop(FailureKind.TIMEOUT, None):
            self._num_failed[FailureKind.CRASH] += 1

    return mutant


@pytest.mark.parametrize(
    "bug", [failures_become_zero, failures_keep_a_reward, timeouts_count_as_crashes]
)
def test_R12_check_catches_in_the_driver(monkeypatch, bug):
    monkeypatch.setattr(Scorer, "_finish", bug(Scorer._finish))
    with pytest.raises(AssertionError):
        check_failures_are_exact(*score_with_injections(num_samples=20))


def test_R12_check_catches_errors_swallowed_in_the_worker(monkeypatch):
    plant(monkeypatch, "errors score 0")
    with pytest.raises(AssertionError):
        check_failures_are_exact(*score_with_injections(num_samples=20))


@pytest.mark.parametrize("kind", FailureKind)
def test_R12_half_of_the_samples_stop_the_run_with_the_kind_named(kind):
    samples = [make_sample("good", index=i) for i in range(10)]
    for sample in samples[:4]:
        sample.failure, sample.failure_detail = kind, "score: the detail"
    other = next(other for other in FailureKind if other is not kind)
    samples[4].failure = other
    with pytest.raises(FailureRateError) as caught:
        check_failure_rate(samples, 0.3)
    text = str(caught.value)
    for part in ("5 of 10", "30%", "max_failure_rate", f"4 x {kind}", f"1 x {other}", "the detail"):
        assert part in text
    check_failure_rate(samples, 0.5)  # the limit itself is allowed


def test_failure_rate_of_nothing_and_of_successes():
    check_failure_rate([], 0.0)
    check_failure_rate([make_sample()], 0.0)


def test_R12_a_verdict_is_never_both_reward_and_failure():
    sample = make_sample("x")
    scorer = Scorer(RewardConfig(), max_completion_tokens=4)
    both = Verdict(reward=Reward(total=0.0), failure=FailureKind.CRASH)
    with pytest.raises(AssertionError):
        scorer._finish(sample, both)
    assert sample.reward is None
