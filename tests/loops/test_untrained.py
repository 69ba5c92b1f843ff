"""Steps without a trained token: an alarm that names the cause, and the end of the run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.loops.conftest import MakeConfig
from tests.tiny_runs import lines

from hone.config.tree import RLConfig
from hone.errors import UserError
from hone.loops import reinforce
from hone.loops.reinforce import run
from hone.loops.untrained import Untrained, why_untrained
from hone.rollout.counts import RolloutCounts
from hone.types import Column, FailureKind, Group, Prompt, Reward, Row, Sample, StopReason

FAILURE, PROMPT = "the ruler broke", Prompt(id="data:0", token_ids=(1,), text="?")


def group(*outcomes: float | FailureKind, truncated: bool = False) -> Group:
    """Samples with these rewards or failures."""
    samples = [
        Sample(
            id=f"0/{index}",
            prompt=PROMPT,
            index=index,
            token_ids=[5, 6],
            logprobs=[-1.0, -1.0],
            weight_versions=[0, 0],
            loss_mask=[True, True],
            stop_reason=StopReason.LENGTH if truncated else StopReason.EOS,
            reward=None if isinstance(outcome, FailureKind) else Reward(total=outcome),
            failure=outcome if isinstance(outcome, FailureKind) else None,
            failure_detail=FAILURE if isinstance(outcome, FailureKind) else "",
        )
        for index, outcome in enumerate(outcomes)
    ]
    return Group(id="0", prompt=PROMPT, samples=samples)


def row(*mask: bool) -> Row:
    return Row(
        id="0/0",
        token_ids=[1, 5, 6],
        loss_mask=[False, *mask],
        columns={"advantages": Column(torch.zeros(sum(mask)))},
    )


TIMEOUT, MASKS = FailureKind.TIMEOUT, {"rollout": {"truncated_samples": "mask"}}
ICEPOP = {"algorithm": {"correction": {"kind": "icepop"}}}
DROPPED = RolloutCounts(num_dropped_groups=40, num_refill_rounds=9)
CAUSES: dict[str, tuple[dict[str, Any], list[Group], list[Row], list[str]]] = {
    # settings, groups, rows, and what the cause says
    "dropped": ({}, [], [], ["rollout.dynamic_sampling dropped all 40 groups of 10 rounds"]),
    "failed": (
        {},
        [group(TIMEOUT, TIMEOUT)],
        [],
        ["None of 2 samples", "2 x timeout. The commonest", FAILURE],
    ),
    "no baseline": (
        {},
        [group(1.0, TIMEOUT)],
        [],
        ["algorithm.advantage grpo", "1 x timeout", FAILURE],
    ),
    "no baseline, no failure": (
        {},
        [group(1.0), group(0.0)],
        [],
        ["no group has two with a reward."],
    ),
    "truncated": (
        MASKS,
        [group(0.0, 1.0, truncated=True)],
        [row(False, False)],
        ["rollout.truncated_samples is mask", "rollout.max_completion_tokens 8"],
    ),
    "masked otherwise": (MASKS, [group(0.0, 1.0)], [row(False, False)], ["masks of all 2 samples"]),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_is_named(name: str, make_config: MakeConfig) -> None:
    sections, groups, rows, said = CAUSES[name]
    found = why_untrained(make_config(**sections), groups, rows, DROPPED)
    assert found is not None
    assert found.may_be_chance == (name == "dropped")
    for text in said:
        assert text in found.cause


def test_failures_in_dropped_groups_are_told(make_config: MakeConfig) -> None:
    counts = RolloutCounts()
    counts.count_dropped(group(1.0, TIMEOUT, TIMEOUT))
    counts.count_dropped(group(1.0, 1.0))
    found = why_untrained(make_config(), [], [], counts)
    assert found is not None
    assert "all 2 groups" in found.cause
    assert "(2 of their samples failed)" in found.cause


@pytest.mark.parametrize("correction", [None, 0.01, 0.0])
def test_one_trained_token_is_enough_unless_it_is_corrected_away(
    correction: float | None, make_config: MakeConfig
) -> None:
    rows = [row(False, False), row(False, True)]
    cfg = make_config(**ICEPOP)
    found = why_untrained(cfg, [group(0.0, 1.0)], rows, RolloutCounts(), correction=correction)
    assert (found is None) == (correction != 0)
    assert found is None or "algorithm.correction.kind icepop drops every token" in found.cause


REWARDS = """
def same(completion):
    return 1.0

def broken(completion, answer):
    if completion == answer:  # as the run asks before it starts
        return 1.0
    raise ValueError("the ruler broke")
"""


def untrained_config(make_config: MakeConfig, folder: Path, reward: str) -> RLConfig:
    (folder / "untrained.py").write_text(REWARDS)
    functions = [{"fn": f"{folder / 'untrained.py'}:{reward}"}]
    return make_config(
        run={"steps": 12},
        rollout={"max_completion_tokens": 2}
        | ({"dynamic_sampling": True, "prompts_per_step": 1} if reward == "same" else {}),
        reward={"functions": functions, "max_failure_rate": 1.0},
    )


AHEAD: dict[str, Any] = {"cluster": {"num_engines": 1}, "pipeline": {"max_staleness": 1}}


@pytest.mark.parametrize(
    ("reward", "sections", "said"),
    [
        ("same", {}, "rollout.dynamic_sampling dropped all 10 groups of 10 rounds"),
        ("same", AHEAD, "rollout.dynamic_sampling dropped all "),
        ("broken", {}, "None of 16 samples has a reward: 16 x exception"),
        ("broken", AHEAD, "None of 16 samples has a reward: 16 x exception"),
    ],
)
def test_a_run_that_trains_nothing_ends_with_the_cause(
    reward: str, sections: dict[str, Any], said: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    cfg = untrained_config(partial(make_config, **sections), tmp_path, reward)
    with pytest.raises(UserError, match=said) as error:
        run(cfg)
    last = 10 if reward == "same" else 3
    assert f"{last} updates in a row" in str(error.value)
    rows = lines(cfg.run.dir / "metrics.jsonl")
    assert [r["train/untrained_steps"] for r in rows] == [*range(1, last + 1)]
    events = lines(cfg.run.dir / "events.jsonl")
    (alarm,) = [e for e in events if e["kind"] == "alarm" and e.get("name") == "untrained"]
    assert said in alarm["message"]
    assert alarm["step"] == 1
    (saved,) = [e for e in events if e["kind"] == "checkpoint"]
    assert saved["step"] == last


@pytest.mark.parametrize(
    ("steps", "counted"),
    [
        ("mm.mm.", [1, 2, 0, 1, 2, 0]),  # m: masked, which recurs; d: all dropped, maybe chance
        ("ddddmmd.", [1, 2, 3, 4, 5, 6, 7, 0]),
    ],
)
def test_only_steps_in_a_row_end_a_run(
    steps: str, counted: list[int], make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"m": Untrained("masked"), "d": Untrained("dropped", may_be_chance=True), ".": None}
    causes = iter(steps)
    monkeypatch.setattr(reinforce, "why_untrained", lambda *_, **__: found[next(causes)])
    cfg = make_config(run={"steps": len(steps)})
    assert run(cfg).stopped_by is None
    assert [r["train/untrained_steps"] for r in lines(cfg.run.dir / "metrics.jsonl")] == counted
