"""Functions of whole groups with environments: the rewards of episodes, against those that are
computed by hand from the same episodes with functions of single samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hone.rewards.scorer import Scorer
from hone.rewards.settings import RewardConfig
from hone.rollout.episodes import Episodes
from hone.rollout.runner import Runner, RunningGroup
from hone.rollout.settings import EnvConfig
from hone.types import FailureKind, Sample, SamplingParams
from tests.rewards.serving import serving
from tests.rollout.fakes import FakeEngine, prompt, render

CODE = '''
import os
from pathlib import Path

from hone.envs import Observation
from hone.envs.session import End


def answer(turns, must_end):
    """One to four turns, which end with a reward, without one, or in an error."""
    number = sum(map(int, turns[-1].split()))
    if number % 9 == 4:
        raise ValueError("of this episode")
    if number % 5 == 0:
        return {"score": number % 3, "number": number}
    if not must_end and number % 3:
        return Observation(token_ids=(5, number % 50), reward=0.25 * (number % 2))
    return None


class Stateless:
    def __init__(self, folder):
        pass

    def step(self, episode):
        return answer(episode.turns, episode.must_end)


class Live:
    """Each third of its episodes is lost once, in its second turn."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def start(self, row):
        self.turns = []

    def step(self, action):
        self.turns.append(action.text)
        mark = self.folder / "-".join(self.turns).replace(" ", "_")
        if len(self.turns) == 2 and len(action.token_ids) % 3 == 1 and not mark.exists():
            mark.touch()
            os._exit(3)
        return answer(self.turns, action.must_end)

    def finish(self):
        return None


def own(completion):
    return len(completion) / 8


def rank(completions, log_extra, log_metric, **columns):
    """How many others are shorter. Fails where a completion has two fours."""
    if any("4 4" in text for text in completions):
        raise RuntimeError("of this group")
    log_metric("size", len(completions))
    return [sum(len(other) < len(text) for other in completions) / 4 for text in completions]
'''
NUM_SAMPLES = 6
OWN = {"fn": "own"}
RANK = {"fn": "rank", "weight": 2.0, "whole_groups": True}


def played(
    folder: Path, name: str, functions: Sequence[dict[str, Any]], *, seed: int, num_groups: int = 12
) -> tuple[dict[str, Sample], dict[FailureKind, int], int]:
    """Episodes of a real scorer, by id, with what it has counted."""
    folder.mkdir()
    file = folder / "code.py"
    file.write_text(CODE)
    entries = [
        entry | {"fn": f"{file}:{entry['fn']}"} if entry in (OWN, RANK) else entry
        for entry in functions
    ]
    rewards = RewardConfig.model_validate({"functions": entries, "num_workers": 2})
    env = EnvConfig(path=f"{file}:{name}", args={"folder": str(folder)}, max_turns=4, retries=1)
    with Scorer(rewards, max_completion_tokens=30, env=env) as scorer:
        episodes = Episodes(
            decode=lambda ids: " ".join(map(str, ids)),
            max_turns=scorer.max_turns,
            render=render,
            run_seed=seed,
        )
        runner = Runner(FakeEngine(end_every=3), scorer, episodes)
        runner.submit(
            RunningGroup.of(
                prompt(order),
                SamplingParams(max_tokens=30),
                episodes,
                group_id=f"group-{order}",
                indices=range(NUM_SAMPLES),
                order=order,
            )
            for order in range(num_groups)
        )
        ended: dict[str, Sample] = {}
        while runner.groups:
            for entry in runner.step().groups:
                ended |= {sample.id: sample for sample in entry.group.samples}
        assert (runner.num_undecided, runner.num_unfinished, scorer.pending) == (0, 0, 0)
        stats = scorer.stats()
    assert stats.num_scored + sum(stats.num_failed.values()) == len(ended)
    return ended, dict(stats.num_failed), stats.num_restarts


def outcome(sample: Sample) -> dict[str, float] | FailureKind | None:
    if sample.reward is None:
        return sample.failure
    return {"total": sample.reward.total, **sample.reward.parts}


def by_hand(alone: dict[str, Sample]) -> dict[str, dict[str, float] | FailureKind | None]:
    """The outcomes with `rank`, from the samples of the same episodes without it."""
    expected: dict[str, dict[str, float] | FailureKind | None] = {}
    for group in {name.partition("/")[0] for name in alone}:
        samples = [alone[f"{group}/{index}"] for index in range(NUM_SAMPLES)]
        texts = [one.text for one in samples if one.reward and "own" in one.reward.parts]
        for one in samples:
            expected[one.id] = outcome(one)
            if one.reward is None or "own" not in one.reward.parts:
                continue  # it has failed, or the environment has scored it
            if any("4 4" in text for text in texts):
                expected[one.id] = FailureKind.EXCEPTION
            else:
                place = sum(len(other) < len(one.text) for other in texts) / 4
                parts = {"rank": place, "rank/size": float(len(texts))}
                total = one.reward.total + 2.0 * place
                expected[one.id] = {**one.reward.parts, **parts, "total": total}
    return expected


@pytest.mark.parametrize(("name", "seed"), [("Stateless", 1), ("Live", 2)])
def test_episodes_that_end_without_a_reward_are_compared(
    tmp_path: Path, name: str, seed: int
) -> None:
    """Those of a group that have not failed, once all have ended; what the environment scored by
    itself keeps its reward and is in no comparison."""
    alone, failed_alone, num_restarts = played(tmp_path / "alone", name, [OWN], seed=seed)
    compared, num_failed, again = played(tmp_path / "compared", name, [RANK, OWN], seed=seed)
    expected = by_hand(alone)
    assert {one: sample.token_ids for one, sample in compared.items()} == {
        one: sample.token_ids for one, sample in alone.items()
    }
    for one, sample in compared.items():
        expects = expected[one]
        is_valid = isinstance(expects, dict)
        assert outcome(sample) == (pytest.approx(expects) if is_valid else expects), one
        assert not sample.awaits_group
    assert num_failed[FailureKind.EXCEPTION] > failed_alone[FailureKind.EXCEPTION]
    assert again == num_restarts
    assert bool(again) is (name == "Live")
    assert any(sample.attempt and sample.valid for sample in compared.values()) is (name == "Live")
    kinds = Counter(
        "failed" if sample.reward is None else "own" in sample.reward.parts
        for sample in alone.values()
    )
    assert min(kinds["failed"], kinds[True], kinds[False]) > 5, kinds
    assert {len(sample.turns) for sample in alone.values()} >= {1, 2, 4}


def test_judges_and_services_score_episodes_of_several_turns(tmp_path: Path) -> None:
    """The text of all turns with what the environment said; a service compares those of a group."""
    with serving() as server:
        service = {"fn": f"{server.url}/get_reward", "whole_groups": True}
        asked = {
            "base_url": f"{server.url}/v1",
            "model": "m",
            "template": "{completion}",
            "pattern": r"Score: (\d+)\Z",
        }
        functions = [service, {"fn": "judge", "args": asked}]
        episodes, _, _ = played(tmp_path / "run", "Stateless", functions, seed=3, num_groups=4)
        compared = [content["query"] for path, _, content in server.requests if "reward" in path]
    left = [one for one in episodes.values() if one.reward and "judge" in one.reward.parts]
    assert any(len(one.turns) > 1 for one in left)
    groups: dict[str, list[str]] = {}
    for one in sorted(left, key=lambda one: one.id):
        assert one.reward is not None
        assert one.reward.parts["judge"] == one.text.count("4")
        name = next(key for key in one.reward.parts if key.endswith("get_reward"))
        share = sum(c in "02468" for c in one.text) / len(one.text)
        assert one.reward.parts[name] == pytest.approx(share)
        earned = one.reward.parts.get("env", 0.0)
        assert one.reward.total == pytest.approx(earned + one.text.count("4") + share)
        groups.setdefault(one.id.partition("/")[0], []).append(one.prompt.text + one.text)
    assert sorted(compared) == sorted(groups.values())
