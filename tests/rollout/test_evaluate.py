"""Evaluation: the estimator, the summary, and that nothing is left behind."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from hone.cli.eval import _table
from hone.config.run import EvalConfig, EvaluationConfig
from hone.config.tree import EvaluateConfig
from hone.model_input import TEXT, Content, ModelInput
from hone.observe.metrics import to_scalars
from hone.rewards.scorer import FailureRateError
from hone.rewards.settings import RewardConfig
from hone.rollout.collector import SingleProcess
from hone.rollout.episodes import Episodes
from hone.rollout.eval_metrics import PassRule, pass_at_k, pass_rule, summarise
from hone.rollout.evaluate import evaluate
from hone.rollout.requests import sampling_params
from hone.types import FailureKind, Reward, Sample, StopReason
from tests.rollout.fakes import FakeEngine, FakeScorer, LateEngine, draw, prompt
from tests.tables import table


@table("n, c, k", [(4, 2, 1), (4, 2, 3), (8, 1, 4), (5, 0, 2), (5, 5, 5)])
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
        episodes=Episodes(decode=str, run_seed=3, purpose="eval"),
    )
    assert not engine.has_unfinished
    assert not scorer.pending
    return samples


def test_summary_equals_a_recount_from_the_samples() -> None:
    cfg = EvalConfig(n_samples_per_prompt=4, max_completion_tokens=8)
    samples = run(FakeScorer(delay=3), cfg)
    assert [sample.index for sample in samples] == [0, 1, 2, 3] * 12
    scalars = to_scalars(summarise(samples, cfg, PassRule(("fake",), 1.0)))
    rewards = [sample.reward.total for sample in samples if sample.reward]
    assert scalars["eval/reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
    assert scalars["eval/pass@1"] == pytest.approx(scalars["eval/reward/mean"])
    solved = [any(rewards[i : i + 4]) for i in range(0, 48, 4)]
    assert scalars["eval/pass@4"] == pytest.approx(sum(solved) / len(solved))
    assert set(scalars) >= {"eval/pass@2", "eval/truncated_share", "eval/completion_tokens/mean"}


@pytest.mark.parametrize("engine", [FakeEngine(), LateEngine(length=lambda _: 5)])
@pytest.mark.parametrize("after", [0, 3, 30], ids="stopped after {} steps".format)
def test_a_stopped_evaluation_leaves_nothing_behind(engine: FakeEngine, after: int) -> None:
    """While it samples and, once that has ended, while it waits for scores that never come."""
    steps = iter(range(after))
    scorer = FakeScorer(delay=10**6)
    samples = evaluate(
        [prompt(i) for i in range(12)],
        engine=engine,
        scorer=scorer,
        cfg=EvalConfig(max_completion_tokens=8),
        episodes=Episodes(decode=str, run_seed=3, purpose="eval"),
        should_stop=lambda: next(steps, None) is None,
    )
    assert samples is None
    assert not engine.has_unfinished
    assert not scorer.pending


@pytest.mark.parametrize("own_stops", [True, False])
def test_an_evaluation_stops_in_all_processes(own_stops: bool) -> None:
    class Two(SingleProcess):
        size = 2

        def gather(self, value: Any) -> list[Any]:
            return [value, [] if own_stops else None]

    samples = evaluate(
        [prompt(i) for i in range(4)],
        engine=FakeEngine(),
        scorer=FakeScorer(),
        cfg=EvalConfig(max_completion_tokens=8),
        episodes=Episodes(decode=str, run_seed=3, purpose="eval"),
        comm=Two(),
        should_stop=lambda: own_stops,
    )
    assert samples is None


@pytest.mark.parametrize("num_failing", [10, 11, 20, 40])
def test_scoring_ends_once_too_many_have_failed(num_failing: int) -> None:
    """Of 40 samples a quarter, 10, may fail; the slowest takes far longer than any other."""
    failing = {f"eval-{n // 4}/{n % 4}" for n in range(num_failing)}
    last = "eval-9/3"

    class Slow(FakeScorer):
        def submit(self, *samples: Sample) -> None:
            self._waiting += [(10**3 if sample.id == last else 0, sample) for sample in samples]

    scorer = Slow(fails=lambda s: FailureKind.TIMEOUT if s.id in failing else None)
    scored = partial(
        evaluate,
        [prompt(i) for i in range(10)],
        engine=FakeEngine(length=lambda r: 1 + int(r.id.partition("-")[2].partition("/")[0])),
        scorer=scorer,
        cfg=EvalConfig(n_samples_per_prompt=4, max_completion_tokens=16),
        episodes=Episodes(decode=str, run_seed=3, purpose="eval"),
        max_failure_rate=0.25,
    )
    if num_failing == 10:
        assert len(scored()) == 40
        return
    with pytest.raises(FailureRateError) as caught:
        scored()
    samples = caught.value.samples
    assert len(samples) < 40
    failed = sum(sample.failure is not None for sample in samples)
    assert failed == 11 if num_failing == 11 else failed <= 14, "soon after the eleventh"
    assert f"{failed} of 40 samples have no reward" in str(caught.value)
    counts = f"{len(samples) - failed} are scored, the other {40 - len(samples)} were not waited"
    assert counts in str(caught.value)


def test_the_same_seed_draws_the_same_samples() -> None:
    cfg = EvalConfig(max_completion_tokens=8)
    first, second = run(FakeScorer(), cfg), run(FakeScorer(delay=2), cfg)
    assert [s.token_ids for s in first] == [s.token_ids for s in second]


def test_R21_each_sample_of_an_evaluation_has_a_seed_of_its_own() -> None:
    """Equal ones would draw alike for all prompts; those of training draw from what is learnt."""
    seeds: list[int] = []
    for purpose in ("eval", "rollout"):
        requests = [
            Episodes(decode=str, run_seed=3, purpose=purpose).first_request(
                f"{number}/{index}", prompt(number), sampling_params(EvalConfig(), ()), number=0
            )
            for number in range(5)
            for index in range(3)
        ]
        seeds += [request.sampling.seed for request in requests]
    assert len(set(seeds)) == 2 * 5 * 3
    engine = FakeEngine()
    cfg = EvalConfig(n_samples_per_prompt=3, max_completion_tokens=8)
    evaluate(
        [prompt(number) for number in range(5)],
        engine=engine,
        scorer=FakeScorer(),
        cfg=cfg,
        episodes=Episodes(decode=str, run_seed=3, purpose="eval"),
    )
    assert [request.sampling.seed for request in engine.submitted] == seeds[:15]


def test_R12_failed_samples_are_counted_and_left_out() -> None:
    cfg = EvalConfig(n_samples_per_prompt=2, max_completion_tokens=8)
    scorer = FakeScorer(
        lambda _: 1.0,
        fails=lambda s: FailureKind.CRASH if draw("f", s.id) % 3 == 0 else None,
    )
    samples = run(scorer, cfg)
    failed = sum(sample.failure is not None for sample in samples)
    scalars = to_scalars(summarise(samples, cfg, "not asked"))
    assert scalars["eval/failed_share"] == pytest.approx(failed / len(samples))
    assert scalars["eval/reward/mean"] == 1.0, "a failure is not a zero"


def scored(*prompts: list[dict[str, float] | None]) -> list[Sample]:
    """Samples by prompt, each with what every reward function gave it; None has failed."""
    return [
        Sample(
            id=f"{number}/{index}",
            prompt=prompt(number),
            index=index,
            token_ids=[1],
            logprobs=[-1.0],
            weight_versions=[0],
            loss_mask=[True],
            stop_reason=StopReason.EOS,
            reward=None if parts is None else Reward(total=sum(parts.values()), parts=parts),
            failure=FailureKind.CRASH if parts is None else None,
        )
        for number, samples in enumerate(prompts)
        for index, parts in enumerate(samples)
    ]


def shaped_samples(num_prompts: int, num_samples: int) -> list[Sample]:
    """A shaped total that is nearly always above a half, and right answers now and then."""
    rng = np.random.default_rng(5)
    rows: list[list[dict[str, float] | None]] = []
    for _ in range(num_prompts):
        skill = rng.random()
        row: list[dict[str, float] | None] = []
        for _ in range(num_samples):
            right = float(rng.random() < skill)
            parts = {"right": right, "closeness": 0.5 + 0.4 * rng.random(), "right/digits": 3.0}
            row.append(None if rng.random() < 0.1 else parts)
        rows.append(row)
    return scored(*rows)


@pytest.mark.parametrize("num_samples", [1, 4])
def test_metrics_of_shaped_rewards_equal_a_recount_in_float64(num_samples: int) -> None:
    cfg = EvaluationConfig(n_samples_per_prompt=num_samples)
    samples = shaped_samples(40, num_samples)
    scalars = to_scalars(summarise(samples, cfg, PassRule(("right",), 1.0)))
    names = {"reward": None, "reward/right": "right", "reward/closeness": "closeness"}
    for metric, part in names.items():
        values = [
            [
                s.reward.parts[part] if part else s.reward.total
                for s in samples[i : i + num_samples]
                if s.reward
            ]
            for i in range(0, len(samples), num_samples)
        ]
        values = [np.array(held, dtype=np.float64) for held in values if held]
        flat = np.concatenate(values)
        sums, counts = np.array([v.sum() for v in values]), np.array([len(v) for v in values])
        residuals = sums - counts * flat.mean()
        number = len(values)
        error = np.sqrt(number / (number - 1) * (residuals**2).sum()) / len(flat)
        assert scalars[f"eval/{metric}/mean"] == pytest.approx(flat.mean(), abs=1e-12)
        assert scalars[f"eval/{metric}/stderr"] == pytest.approx(error, abs=1e-12)
        if num_samples == 1:
            usual = flat.std(ddof=1) / np.sqrt(len(flat))
            assert error == pytest.approx(usual)
    exact = np.mean([s.reward.parts["right"] for s in samples if s.reward])
    if num_samples == 1:
        assert scalars["eval/pass@1"] == pytest.approx(exact)
        assert scalars["eval/pass@1/stderr"] == pytest.approx(scalars["eval/reward/right/stderr"])
    assert scalars["eval/pass@1"] < 0.8, "the total is at least a half in every sample"
    assert scalars["eval/pass_threshold"] == 1.0
    assert scalars["eval/num_prompts"] == 40
    assert scalars["eval/num_samples"] == 40 * num_samples


@pytest.mark.parametrize("num_samples", [1, 4])
def test_rows_that_repeat_a_prompt_are_one_cluster(num_samples: int) -> None:
    """Eight rows of a prompt are as many samples of it in one row; the means are those of rows."""
    cfg, rule = EvaluationConfig(n_samples_per_prompt=num_samples), PassRule(("right",), 1.0)
    rows = shaped_samples(20, num_samples * 8)
    repeated = [
        replace(
            sample,
            prompt=replace(sample.prompt, id=f"{sample.prompt.id}/{sample.index // num_samples}"),
        )
        for sample in rows
    ]
    scalars = to_scalars(summarise(repeated, cfg, rule))
    expected = to_scalars(summarise(rows, cfg, rule))
    for metric in ("reward", "reward/right", "reward/closeness"):
        for name in (f"eval/{metric}/mean", f"eval/{metric}/stderr"):
            assert scalars[name] == pytest.approx(expected[name], abs=1e-12), name
    assert scalars["eval/num_prompts"] == 20
    rates: dict[str, list[list[bool]]] = {}
    for start in range(0, len(repeated), num_samples):
        passed = [rule.passes(s) for s in repeated[start : start + num_samples] if s.valid]
        if passed:
            rates.setdefault(rows[start].prompt.id, []).append([p is True for p in passed])
    by_prompt = [[sum(row) / len(row) for row in held] for held in rates.values()]
    every = [rate for held in by_prompt for rate in held]
    mean = sum(every) / len(every)
    squares = sum((sum(held) - len(held) * mean) ** 2 for held in by_prompt)
    error = (20 / 19 * squares) ** 0.5 / len(every)
    assert scalars["eval/pass@1"] == pytest.approx(mean)
    assert scalars["eval/pass@1/stderr"] == pytest.approx(error)
    cfg = EvaluateConfig.model_validate({"model": {"path": "m"}, "eval": cfg.model_dump()})
    each = f"160 rows of 20 prompts, {num_samples} sample"
    assert str(_table(cfg, scalars).caption).startswith(each)


@table("column, has_env", [("answer", False), ("seed", True), ("image", False)])
def test_rows_of_one_prompt_that_ask_for_other_things_are_independent(
    column: str, has_env: bool
) -> None:
    """As environments and images have them; where the rows repeat each other they are one cluster
    still."""

    def image(number: int) -> ModelInput:
        content = Content(kind="image", hash=str(number), start=0, num_tokens=1)
        return ModelInput((content,))

    cfg, rule = EvaluationConfig(n_samples_per_prompt=4), PassRule(("right",), 1.0)
    rows = shaped_samples(20, 4)
    expected = to_scalars(summarise(rows, cfg, rule))

    def like(number_of: Callable[[int], int]) -> dict[str, float]:
        shared = [
            replace(
                sample,
                prompt=replace(
                    sample.prompt,
                    token_ids=rows[0].prompt.token_ids,
                    answer=f"{number_of(number // 4)}" if column == "answer" else None,
                    metadata={column: number_of(number // 4)},
                    model_input=image(number_of(number // 4)) if column == "image" else TEXT,
                ),
            )
            for number, sample in enumerate(rows)
        ]
        return to_scalars(summarise(shared, cfg, rule, has_env=has_env))

    assert like(lambda row: row) == expected
    assert like(lambda row: row // 2)["eval/num_prompts"] == 10


ONE, HALF, ZERO = {"a": 1.0}, {"a": 0.5}, {"a": 0.0}
A, OVERLONG = {"fn": "rewards:a"}, {"fn": "overlong", "args": {"buffer_tokens": 4}}
B, C = {"fn": "rewards:b"}, {"fn": "rewards:c"}
UNWEIGHTED, PENALTY = B | {"weight": 0.0}, B | {"weight": -0.5}


@table(
    "functions, samples, settings, expected",
    [
        ([A], [[ONE], [ZERO]], {}, PassRule(("a",), 1.0)),
        ([A], [[ZERO]], {}, PassRule(("a",), 1.0)),
        ([A], [[ONE], [HALF]], {}, r"a returned 0\.5, neither 0 nor 1.*eval\.pass_function"),
        ([A], [[ONE], [HALF]], {"pass_function": "a"}, PassRule(("a",), 1.0)),
        (
            [A],
            [[ONE], [HALF]],
            {"pass_function": "a", "pass_threshold": 0.5},
            PassRule(("a",), 0.5),
        ),
        ([A], [[ONE]], {"pass_function": "b"}, "'b' applies to none"),
        ([A], [[{"a": 1.0, "a/seconds": 0.3}]], {}, PassRule(("a",), 1.0)),
        ([A], [[None]], {}, "no sample has a reward"),
        # of several, each counts, and one that gave only 0 may be shaped
        ([A, B], [[{"a": 1.0, "b": 0.0}], [{"b": 1.0}]], {}, PassRule(("a", "b"), 1.0)),
        ([A, B], [[{"a": 1.0, "b": 0.0}]], {}, r"b returned only 0.*eval\.pass_function"),
        ([A, B], [[{"a": 1.0, "b": 0.3}], [{"a": 0.0, "b": 1.0}]], {}, r"b returned 0\.3"),
        (
            [A, B, C],
            [[{"a": 1.0, "b": 0.0, "c": 0.2}]],
            {},
            r"c returned 0\.2, neither 0 nor 1, b returned only 0",
        ),
        # what says nothing of an answer does not count
        ([A, OVERLONG], [[ONE | {"overlong": 0.0}]], {}, PassRule(("a",), 1.0)),
        ([A, OVERLONG], [[ONE | {"overlong": -0.5}]], {}, PassRule(("a",), 1.0)),
        ([A, UNWEIGHTED], [[ONE | {"b": 0.3}]], {}, PassRule(("a",), 1.0)),
        ([A, PENALTY], [[ONE | {"b": 0.0}]], {}, PassRule(("a",), 1.0)),
        ([PENALTY], [[{"b": 1.0}]], {}, "no function of positive weight"),
    ],
)
def test_by_what_samples_pass(
    functions: list[dict[str, object]],
    samples: list[list[dict[str, float] | None]],
    settings: dict[str, object],
    expected: PassRule | str,
) -> None:
    cfg, given = EvaluationConfig.model_validate(settings), scored(*samples)
    found = pass_rule(given, cfg, RewardConfig.model_validate({"functions": functions}))
    scalars = to_scalars(summarise(given, cfg, found))
    if isinstance(expected, str):
        assert isinstance(found, str)
        assert re.search(expected, found), found
        assert not any("pass@" in name for name in scalars)
        return
    assert found == expected
    passed = [found.passes(sample) for sample in given]
    rate = np.mean([outcome for outcome in passed if outcome is not None])
    assert scalars["eval/pass@1"] == rate
    assert scalars["eval/pass_threshold"] == found.threshold


def test_of_several_functions_of_0_and_1_all_that_apply_must_give_1() -> None:
    both = scored([{"a": 1.0, "b": 1.0}], [{"a": 1.0, "b": 0.0}], [{"b": 1.0}], [{}])
    rule = PassRule(("a", "b"), 1.0)
    assert [rule.passes(sample) for sample in both] == [True, False, True, None]


def test_hone_eval_prints_rows_errors_and_the_threshold() -> None:
    cfg = EvaluateConfig.model_validate(
        {"model": {"path": "m"}, "eval": {"pass_function": "right"}}
    )
    rule = PassRule(("right",), 1.0)
    scalars = to_scalars(summarise(shaped_samples(40, 1), cfg.eval, rule))
    table = _table(cfg, scalars)
    names, values, errors = (list(map(str, column.cells)) for column in table.columns)
    shown = dict(zip(names, zip(values, errors, strict=True), strict=True))
    mean, error = scalars["eval/pass@1"], scalars["eval/pass@1/stderr"]
    assert shown["eval/pass@1 (score >= 1)"] == (f"{mean:.4g}", f"{error:.2g}")
    assert shown["eval/reward/mean"][1] == f"{scalars['eval/reward/stderr']:.2g}"
    assert not any("stderr" in str(name) for name in names)
    failed = round(40 * scalars["eval/failed_share"])
    assert str(table.caption).startswith(f"40 rows, 1 sample each, {failed} of 40 not scored")
