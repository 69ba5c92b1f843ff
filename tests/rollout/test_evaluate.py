"""Evaluation: the estimator, the summary, and that nothing is left behind."""

from __future__ import annotations

from itertools import combinations

import pytest

from hone.config.run import EvalConfig
from hone.observe.metrics import to_scalars
from hone.rollout.evaluate import evaluate, pass_at_k, summarise
from hone.types import FailureKind
from tests.rollout.fakes import FakeEngine, FakeScorer, draw, prompt


@pytest.mark.parametrize(("n", "c", "k"), [(4, 2, 1), (4, 2, 3), (8, 1, 4), (5, 0, 2), (5, 5, 5)])
def test_pass_at_k_counts_all_subsets(n: int, c: int, k: int) -> None:
    outcomes = [True] * c + [False] * (n - c)
    subsets = list(combinations(outcomes, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def run(scorer: FakeScorer, cfg: EvalConfig, num_prompts: int = 12):
    engine = FakeEngine()
    samples = evaluate(
        [prompt(i) for i in range(num_prompts)],
        engine=engine,
        scorer=scorer,
        cfg=cfg,
        decode=str,
        seed=3,
    )
    assert not engine.has_unfinished
    assert not scorer.pending
    return samples


def test_summary_equals_a_recount_from_the_samples() -> None:
    cfg = EvalConfig(n_samples_per_prompt=4, max_completion_tokens=8)
    samples = run(FakeScorer(delay=3), cfg)
    assert [sample.index for sample in samples] == [0, 1, 2, 3] * 12
    scalars = to_scalars(summarise(samples, cfg))
    rewards = [sample.reward.total for sample in samples if sample.reward]
    assert scalars["eval/reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
    assert scalars["eval/pass@1"] == pytest.approx(scalars["eval/reward/mean"])
    solved = [any(rewards[i : i + 4]) for i in range(0, 48, 4)]
    assert scalars["eval/pass@4"] == pytest.approx(sum(solved) / len(solved))
    assert set(scalars) >= {"eval/pass@2", "eval/truncated_share", "eval/completion_tokens/mean"}


def test_the_same_seed_draws_the_same_samples() -> None:
    cfg = EvalConfig(max_completion_tokens=8)
    first, second = run(FakeScorer(), cfg), run(FakeScorer(delay=2), cfg)
    assert [s.token_ids for s in first] == [s.token_ids for s in second]


def test_R12_failed_samples_are_counted_and_left_out() -> None:
    cfg = EvalConfig(n_samples_per_prompt=2, max_completion_tokens=8)
    scorer = FakeScorer(
        lambda _: 1.0,
        fails=lambda s: FailureKind.CRASH if draw("f", s.id) % 3 == 0 else None,
    )
    samples = run(scorer, cfg)
    failed = sum(sample.failure is not None for sample in samples)
    scalars = to_scalars(summarise(samples, cfg))
    assert scalars["eval/failed_share"] == pytest.approx(failed / len(samples))
    assert scalars["eval/reward/mean"] == 1.0, "a failure is not a zero"
