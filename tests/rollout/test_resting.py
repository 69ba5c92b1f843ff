"""What a rollout reports of each prompt, and that all processes draw the same ones by it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hone.data.settings import CurriculumConfig
from hone.data.stream import Stream
from hone.loops.inputs import rates_to
from hone.rollout.buffer import mean_reward
from hone.rollout.collector import SingleProcess
from hone.rollout.state import group_to_dict
from hone.types import FailureKind, Group, Sample
from tests.rollout.fakes import FakeScorer, by_first_token, collect, draw, make_collector, prompt
from tests.rollout.test_sharing import in_threads
from tests.tables import table

NUM_PROMPTS, NUM_STEPS = 11, 6
CURRICULUM = CurriculumConfig(pass_rate=(0.2, 0.8), rest_epochs=2)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dynamic": {"dynamic_sampling": True},
    "oversampled": {"oversample_prompts": 5},
    "dynamic, oversampled": {"dynamic_sampling": True, "oversample_prompts": 3},
}


def stream_of(num: int = NUM_PROMPTS) -> Stream:
    stream = Stream([[prompt(number) for number in range(num)]], seed=4)
    stream.let_rest(CURRICULUM)
    return stream


def sometimes(sample: Sample) -> FailureKind | None:
    return FailureKind.TIMEOUT if draw("fails", sample.id) % 7 == 0 else None


class Run:
    """A stream, a collector over it, and what was reported."""

    def __init__(self, name: str, comm: Any, state: Any = None) -> None:
        self.stream = stream_of()
        self.reported: list[Group] = []
        learn = rates_to(self.stream)
        assert learn is not None

        def on_scored(group: Group) -> None:
            self.reported.append(group)
            learn(group)

        self.collector = make_collector(
            scorer=FakeScorer(by_first_token, delay=3, fails=sometimes),
            prompts=self.stream,
            comm=comm,
            on_scored=on_scored,
            prompts_per_step=4,
            n_samples_per_prompt=3,
            max_completion_tokens=12,
            **SETTINGS[name],
        )
        if state is not None:
            self.stream.load_state_dict(state["stream"])
            self.collector.load_state_dict(state["collector"])

    def step(self, number: int) -> list[Any]:
        groups = collect(self.collector, number)
        dropped = self.collector.counts.num_dropped_groups
        return [[group_to_dict(group) for group in groups], dropped, self.stream.counts]

    def state(self) -> Any:
        """As a checkpoint has it, in JSON."""
        state = {"stream": self.stream.state_dict(), "collector": self.collector.state_dict()}
        return json.loads(json.dumps(state))


def steps(run: Run, first: int = 0) -> list[Any]:
    return [run.step(number) for number in range(first, NUM_STEPS)]


@table("size", [2, 4])
@table("name", SETTINGS)
def test_R21_processes_draw_by_the_same_outcomes(name: str, size: int) -> None:
    alone = Run(name, SingleProcess())
    expected = [*steps(alone), alone.state()]
    assert expected[-2][2]["skipped_resting"] > 0

    def work(comm: Any) -> list[Any]:
        run = Run(name, comm)
        return [*steps(run), run.state()]

    for own in in_threads(size, work):
        assert own == expected


@table("name", SETTINGS)
def test_R18_a_rollout_with_resting_prompts_goes_on_after_every_step(name: str) -> None:
    straight = Run(name, SingleProcess())
    expected = steps(straight)
    saved = Run(name, SingleProcess())
    for number in range(NUM_STEPS - 1):
        saved.step(number)
        again = Run(name, SingleProcess(), saved.state())
        again.collector.engine.weight_version = number + 1
        assert steps(again, number + 1) == expected[number + 1 :]
        assert again.state() == straight.state()


@table("name", SETTINGS)
def test_each_scored_group_is_reported_once_in_the_order_of_its_prompt(name: str) -> None:
    run = Run(name, SingleProcess())
    found = steps(run)
    trained = [group["id"] for groups, *_ in found for group in groups]
    reported = [group.id for group in run.reported]
    assert len(reported) == len({*reported}) == len(trained) + sum(step[1] for step in found)
    assert {*trained} <= {*reported}
    if name == "plain":
        assert reported == trained
    if "dynamic" in name:
        assert len(reported) > len(trained), "some must be dropped"


@pytest.mark.parametrize("dynamic_sampling", [False, True])
def test_with_sampling_ahead_a_group_is_reported_when_it_is_complete(
    dynamic_sampling: bool,
) -> None:
    reported: list[Group] = []
    collector = make_collector(
        scorer=FakeScorer(delay=2),
        prompts=stream_of(500),
        on_scored=reported.append,
        prompts_per_step=4,
        n_samples_per_prompt=3,
        max_completion_tokens=12,
        dynamic_sampling=dynamic_sampling,
        pipeline={"max_staleness": 2},
    )
    trained, num_dropped = list[str](), 0
    for number in range(NUM_STEPS):
        trained += [group.id for group in collect(collector, number)]
        num_dropped += collector.counts.num_dropped_groups
    with collector.idle():
        waiting = [x for x in collector.state_dict()["groups"] if not x["requests"]]
    ids = [group.id for group in reported]
    assert len(ids) == len({*ids}) == len(trained) + num_dropped + len(waiting)
    assert all(sample.reward for group in reported for sample in group.samples)


def test_a_rate_is_the_mean_of_what_could_be_scored() -> None:
    run = Run("plain", SingleProcess())
    steps(run)
    assert any(not sample.valid for group in run.reported for sample in group.samples)
    for group in run.reported:
        rewards = [s.reward.total for s in group.samples if s.failure is None and s.reward]
        rate = mean_reward(group)
        assert rate == (sum(rewards) / len(rewards) if rewards else None)
