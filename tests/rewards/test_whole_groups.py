"""Functions that compare the completions of a prompt are called once for all of them."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hone.rewards.score import RewardFunction, Verdict, add_own, arguments, score, score_group
from hone.rewards.scorer import FailureRateError, Scorer
from hone.rewards.settings import RewardConfig, RewardFunctionConfig
from hone.types import FailureKind, Reward, Sample
from tests.rewards.scoring import make_sample

SOURCE = """
import os, time

def rank(completions, level, log_extra, log_metric, **kwargs):
    if "hang" in completions:
        time.sleep(60)
    if "raise" in completions:
        raise RuntimeError("of the group")
    if "die" in completions:
        os._exit(3)
    assert level == [3] * len(completions)
    log_metric("size", len(completions))
    log_extra("place", range(len(completions)) and list(range(len(completions))))
    lengths = sorted(map(len, completions))
    return [None if text == "none" else lengths.index(len(text)) / 10 for text in completions]

def right(completion):
    if completion == "slow":
        time.sleep(0.3)
    if completion == "bad":
        raise ValueError("of this one")
    return None if completion == "none" else float(completion == "four")

def short(completions):
    return [1.0]
"""


def group(*texts: str) -> list[Sample]:
    prompt = make_sample(level=3).prompt
    samples = [make_sample(text, index=index) for index, text in enumerate(texts)]
    return [replace(one, id=f"g/{one.index}", prompt=prompt) for one in samples]


def scorer(folder: Path, *, whole: str = "rank", **settings: Any) -> Scorer:
    file = folder / "rewards.py"
    file.write_text(SOURCE)
    functions = (
        RewardFunctionConfig(fn=f"{file}:{whole}", whole_groups=True, weight=2.0),
        RewardFunctionConfig(fn=f"{file}:right"),
    )
    settings = {"timeout_s": 60.0, "num_workers": 2} | settings
    return Scorer(RewardConfig(functions=functions, **settings), max_completion_tokens=8)


def outcomes(samples: list[Sample]) -> list[tuple[float, dict[str, float]] | FailureKind | None]:
    return [(s.reward.total, dict(s.reward.parts)) if s.reward else s.failure for s in samples]


def test_one_call_for_all_and_the_weighted_sum_of_each(tmp_path: Path) -> None:
    samples = group("slow", "four", "threes", "no")
    with scorer(tmp_path) as scorer_:
        scorer_.score(samples)
        assert scorer_.stats().num_scored == 4
    others = {"rank/size": 4.0}
    assert outcomes(samples) == [
        (0.2, {"right": 0.0, "rank": 0.1, "rank/place": 0.0} | others),
        (1.2, {"right": 1.0, "rank": 0.1, "rank/place": 1.0} | others),
        (pytest.approx(0.6), {"right": 0.0, "rank": 0.3, "rank/place": 2.0} | others),
        (0.0, {"right": 0.0, "rank": 0.0, "rank/place": 3.0} | others),
    ]


def test_one_that_has_failed_by_itself_is_not_compared(tmp_path: Path) -> None:
    samples = group("four", "bad", "threes", "none")
    lost = replace(make_sample("x"), id="g/4", index=4, failure=FailureKind.ENGINE)
    with scorer(tmp_path) as scorer_:
        scorer_.score([*samples, lost])
        assert (scorer_.pending, scorer_.stats().num_scored) == (0, 2)
    failed = FailureKind.INVALID  # both functions abstained
    assert [s.reward.parts["rank/size"] if s.reward else s.failure for s in samples] == [
        3.0, FailureKind.EXCEPTION, 3.0, failed,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("raise", FailureKind.EXCEPTION),
        ("hang", FailureKind.TIMEOUT),
        ("die", FailureKind.CRASH),
    ],
)
def test_a_call_that_fails_costs_all_samples_of_the_group(
    tmp_path: Path, text: str, failure: FailureKind
) -> None:
    bad, good = group("four", text, "no"), group("four", "no")
    limit_s = 2.0 if failure is FailureKind.TIMEOUT else 60.0
    with scorer(tmp_path, timeout_s=limit_s) as scorer_:
        scorer_.submit(*bad, *good)
        alone = list[Sample]()
        while scorer_.pending:
            alone += scorer_.poll(1.0)
        assert sorted(map(id, alone)) == sorted(map(id, [*bad, *good]))
        assert all(sample.awaits_group for sample in alone)
        assert scorer_.stats().num_scored == 0
        scorer_.compare(bad)
        scorer_.compare(good)
        assert scorer_.pending == 5
        while scorer_.pending:
            assert not any(sample.awaits_group for sample in scorer_.poll(1.0))
        assert scorer_.stats().num_failed == {failure: 3}
    assert [sample.failure for sample in bad] == [failure] * 3
    assert all("rank" in sample.failure_detail for sample in bad)
    assert all(sample.reward is not None for sample in good)


def test_what_is_wrong_with_every_call_is_found_before_the_run(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    prompt = group("four")[0].prompt
    with scorer(tmp_path) as scorer_:
        scorer_.check_data([prompt], lambda text: [1])
    assert "with lists of all completions of a prompt" in caplog.text
    with (
        scorer(tmp_path, whole="short") as scorer_,
        pytest.raises(ValueError, match="returned 1 values for a list of 2"),
    ):
        scorer_.check_data([prompt], lambda text: [1])


@pytest.mark.parametrize("source", ["def f(completion): return 1.0", "f = lambda solution_str: 1"])
def test_one_that_takes_no_lists_is_refused(tmp_path: Path, source: str) -> None:
    (tmp_path / "own.py").write_text(source)
    entry = RewardFunctionConfig(fn=f"{tmp_path / 'own.py'}:f", whole_groups=True)
    with pytest.raises(ValueError, match="scores one completion a call, and whole_groups is true"):
        Scorer(RewardConfig(functions=(entry,)), max_completion_tokens=8)


def labels_of(queries: list[str], prompts: list[str], labels: list[Any]) -> dict[str, Any]:
    assert queries == [f"Q: ?{text}" for text in ("a", "bb")]
    assert (prompts, labels) == (["Q: ?"] * 2, [""] * 2)
    return {"rewards": torch.tensor([[0.0], [1.0]]), "extra_logs": {"own": [5, 6], "all": 7}}


def test_openrlhf_gets_lists_of_the_group() -> None:
    function = RewardFunction(labels_of, name="f", weight=1.0, args={}, whole_groups=True)
    givens = [arguments(sample, max_completion_tokens=8) for sample in group("a", "bb")]
    found = score_group([function], givens, on_call=lambda index: None)
    assert [verdict.reward for verdict in found.of_group] == [
        Reward(total=0.0, parts={"f": 0.0, "f/own": 5.0, "f/all": 7.0}),
        Reward(total=1.0, parts={"f": 1.0, "f/own": 6.0, "f/all": 7.0}),
    ]


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ([1.0], "returned 1 values for a list of 2"),
        ([1.0, 2.0, 3.0], "returned 3 values for a list of 2"),
        (1.0, "returned 1.0; a function that takes `completions`"),
        ([1.0, float("nan")], "nan"),
        (["1", 1.0], "returned str"),
    ],
)
def test_what_may_not_be_returned(returned: Any, told: str) -> None:
    def f(completions: list[str]) -> Any:
        return returned

    function = RewardFunction(f, name="f", weight=1.0, args={}, whole_groups=True)
    given = arguments(make_sample("a"), max_completion_tokens=8)
    found = score_group([function], [given, given], on_call=lambda index: None)
    assert (found.failure, told in found.detail) == (FailureKind.INVALID, True), found.detail


def test_all_may_abstain_of_one_and_the_sum_is_finite() -> None:
    def f(completions: list[str]) -> list[float | None]:
        return [None] * len(completions)

    function = RewardFunction(f, name="f", weight=1.0, args={}, whole_groups=True)
    given = arguments(make_sample("a"), max_completion_tokens=8)
    own = score([function], given)
    assert own.reward == Reward(total=0.0, parts={}, is_partial=True)
    (in_group,) = score_group([function], [given], on_call=lambda index: None).of_group
    assert "every reward function returned None" in add_own(own.reward, in_group).detail
    large = Reward(total=1.7e308, parts={"f": 1.0})
    assert "is inf" in add_own(large, Verdict(reward=large)).detail


def test_a_run_that_goes_on_without_such_functions_keeps_what_waits(tmp_path: Path) -> None:
    """One that nothing else has scored has no reward."""
    samples = group("four", "no")
    samples[0].reward = Reward(total=9.5, parts={"right": 9.5}, is_partial=True)
    samples[1].reward = Reward(total=0.0, is_partial=True)
    (tmp_path / "rewards.py").write_text(SOURCE)
    functions = (RewardFunctionConfig(fn=f"{tmp_path / 'rewards.py'}:right"),)
    rewards = RewardConfig(functions=functions, clip=(0.0, 2.0), num_workers=1)
    with Scorer(rewards, max_completion_tokens=8) as scorer_:
        scorer_.compare(samples)
        assert scorer_.pending == 2
        assert scorer_.poll() == samples
        assert scorer_.pending == 0
    assert samples[0].reward == Reward(total=2.0, parts={"right": 9.5})
    assert samples[1].failure is FailureKind.INVALID


def test_some_that_fail_while_others_wait_for_their_group_do_not_end_the_run(
    tmp_path: Path,
) -> None:
    """Many that fail in the call of their group, and none that waits, do."""
    with scorer(tmp_path) as scorer_:
        samples = [replace(one, id=f"g/{n}") for n, one in enumerate(group(*["bad", "four"] * 30))]
        for one in samples:
            scorer_.submit(one)
            while scorer_.pending:
                scorer_.poll(1.0)
        assert [one.awaits_group for one in samples] == [False, True] * 30
        failing = samples[1::2]
        failing[0].text = "raise"
        scorer_.compare(failing)
        with pytest.raises(FailureRateError, match="all of the first 24 samples failed"):
            scorer_.poll(60.0)
