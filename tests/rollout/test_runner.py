"""The runner: episodes of several turns, driven from inside and from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hone.config.run import EvaluationConfig
from hone.data.template_check import RenderError
from hone.rollout.batch import Batch
from hone.rollout.episodes import Episodes
from hone.rollout.evaluate import evaluate
from hone.rollout.runner import Runner, RunningGroup
from hone.rollout.state import sample_to_dict
from hone.types import (
    FailureKind,
    Observation,
    Request,
    Reward,
    Sample,
    SamplingParams,
    StopReason,
)
from tests.rollout.fakes import (
    FakeEngine,
    FakeScorer,
    LateEngine,
    Render,
    collect,
    draw,
    make_collector,
    play,
    prompt,
    render,
)

MOST = 24
SAMPLING = SamplingParams(max_tokens=MOST)


def decode(ids: Any) -> str:
    return " ".join(map(str, ids))


def episodes(**other: Any) -> Episodes:
    settings: dict[str, Any] = {"decode": decode, "max_turns": 4, "render": render, "run_seed": 7}
    return Episodes(**settings | {"purpose": "rollout"} | other)


def fields(sample: Sample) -> dict[str, Any]:
    """All of a sample but its name."""
    return {
        name: value for name, value in sample_to_dict(sample, sample.prompt).items() if name != "id"
    }


def group(runner: Runner, *, order: int = 0, number: int = 0, num_samples: int = 8) -> RunningGroup:
    return RunningGroup.of(
        prompt(0),
        SAMPLING,
        runner.episodes,
        group_id=f"group-{order}",
        indices=range(num_samples),
        order=order,
        number=number,
    )


def length(request: Request) -> int:
    return draw("length", request.sampling.seed) % 6 + 1


def played_inside(number: int) -> list[Sample]:
    runner = Runner(FakeEngine(), FakeScorer(answer=play), episodes())
    runner.submit([entry := group(runner, number=number)])
    while runner.groups:
        runner.step()
    return entry.group.samples


@pytest.mark.parametrize("delay", [0, 3, 50])
def test_training_evaluation_and_batch_play_the_same_episodes(delay: int) -> None:
    """Token for token, however late and in whatever order the environment answers."""
    trained = collect(
        make_collector(
            scorer=FakeScorer(answer=play, delay=delay),
            prompts_per_step=1,
            n_samples_per_prompt=8,
            max_completion_tokens=MOST,
        ),
        0,
    )[0].samples
    evaluated = evaluate(
        [prompt(0)],
        engine=FakeEngine(),
        scorer=FakeScorer(answer=play, delay=delay),
        cfg=EvaluationConfig(n_samples_per_prompt=8, max_completion_tokens=MOST, temperature=1.0),
        episodes=episodes(),
    )
    batch = Batch(
        iter([(0, prompt(0))]),
        Runner(FakeEngine(), FakeScorer(answer=play, delay=delay), episodes()),
        sampling=SAMPLING,
        num_samples=8,
        max_in_engine=3,
    )
    written: list[Sample] = []
    while not batch.is_done:
        written += [sample for _, samples in batch.step() for sample in samples]
    expected = [fields(sample) for sample in trained]
    assert {len(sample.turns) for sample in trained} >= {1, 2, 4}
    assert [fields(sample) for sample in evaluated or []] == expected
    assert [fields(sample) for sample in written] == expected


def drive(runner: Runner, names: set[str], *, interrupt_every: int = 0) -> dict[str, Sample]:
    """Answer the turns of opened episodes as `play` does inside, until all are closed."""
    closed: dict[str, Sample] = {}
    for number in range(10_000):
        if not runner.groups:
            return closed
        for sample in runner.step().turns:
            assert sample.id in names
            answer = play(sample)
            if answer is None or not runner.extend(sample.id, answer):
                reward = Reward(total=total(sample), parts={"fake": total(sample)})
                closed[sample.id] = runner.close(sample.id, reward)
        if interrupt_every and number % interrupt_every == 0:
            inside = [entry for entry in runner.groups.values() if not entry.is_opened]
            runner.withdraw()
            assert not runner.engine.has_unfinished
            runner.resume(inside)
    raise AssertionError("the episodes do not end")


def total(sample: Sample) -> float:
    return float(sample.token_ids[0] % 2)


@pytest.mark.parametrize("interrupt_every", [0, 1, 3])
def test_an_episode_driven_from_outside_is_that_of_the_environment(interrupt_every: int) -> None:
    """In one runner with a group that is driven from inside, and through interruptions: the same
    ids, masks, log-probabilities, versions, turns, state and reward."""
    runner = Runner(FakeEngine(), FakeScorer(answer=play, delay=2), episodes())
    runner.submit([entry := group(runner, number=5)])
    names = [runner.open(prompt(0), SAMPLING, number=3, index=index) for index in range(8)]
    closed = drive(runner, set(names), interrupt_every=interrupt_every)
    assert [fields(closed[name]) for name in names] == [fields(one) for one in played_inside(3)]
    inside = [fields(sample) for sample in entry.group.samples]
    assert inside == [fields(sample) for sample in played_inside(5)]
    assert not runner.num_unfinished


def test_each_opened_episode_draws_by_itself() -> None:
    runner = Runner(FakeEngine(), None, episodes())
    for _ in range(3):
        runner.open(prompt(0), SAMPLING)
    seeds = {request.sampling.seed for request in runner.engine.submitted}  # type: ignore[attr-defined]
    assert len(seeds) == 3


def test_next_turns_are_submitted_in_a_fixed_order() -> None:
    engine = FakeEngine()
    runner = Runner(engine, FakeScorer(answer=play, delay=3), episodes())
    batches: list[list[tuple[int, ...]]] = []
    submit = engine.submit

    def noted(requests: Any) -> None:
        batches.append([tuple(map(int, one.id.split("-")[1].split("/"))) for one in requests])
        submit(requests)

    engine.submit = noted  # type: ignore[method-assign]
    runner.submit([group(runner, order=order, number=order) for order in range(4)])
    while runner.groups:
        runner.step()
    assert max(len(names) for names in batches[1:]) > 2
    assert all(names == sorted(names) for names in batches)


@pytest.mark.parametrize(("engine", "num_steps"), [(FakeEngine, 2), (LateEngine, 3)])
@pytest.mark.parametrize("num_turns", [0, 1])
def test_a_close_aborts_the_turn_that_is_sampled(
    engine: Callable[..., FakeEngine], num_steps: int, num_turns: int
) -> None:
    """Also one that has just finished, which an engine that computes ahead returns later."""
    runner = Runner(engine(length=lambda _: 3), None, episodes())
    other, name = runner.open(prompt(1), SAMPLING), runner.open(prompt(0), SAMPLING)
    for _ in range(num_turns):
        for sample in both_ended(runner):
            assert runner.extend(sample.id, Observation(token_ids=(7, 8)))
    for _ in range(num_steps):
        assert not runner.step().turns
    sample = runner.close(name, failure=FailureKind.TIMEOUT, detail="the harness is gone")
    if engine is FakeEngine:
        assert runner.engine.stats().num_running == 1, "it samples the other alone"
    assert (sample.failure, sample.failure_detail) == (FailureKind.TIMEOUT, "the harness is gone")
    assert len(sample.turns) == num_turns
    assert len(sample.token_ids) == 5 * num_turns
    assert [one.id for one in runner.step().turns] == [other]
    runner.close(other)
    assert not runner.engine.has_unfinished
    assert not runner.num_unfinished
    with pytest.raises(ValueError, match=f"no episode '{name}' is open"):
        runner.close(name)


def test_a_turn_that_ends_in_a_withdrawal_is_not_returned_once_its_episode_is_closed() -> None:
    runner = Runner(LateEngine(length=lambda _: 1), None, episodes())
    other, name = runner.open(prompt(1), SAMPLING), runner.open(prompt(0), SAMPLING)
    assert not runner.step().turns
    runner.withdraw()
    assert len(runner.close(name, 1.0).turns) == 1
    runner.resume([])
    assert [one.id for one in runner.step().turns] == [other]
    runner.close(other)
    assert not runner.groups
    assert not runner.num_unfinished


def both_ended(runner: Runner) -> list[Sample]:
    while not (turns := runner.step().turns):
        pass
    assert len(turns) == 2
    return turns


def ended(runner: Runner) -> Sample:
    while not (turns := runner.step().turns):
        pass
    return turns[0]


def test_an_episode_without_turns_left_can_only_be_closed() -> None:
    runner = Runner(FakeEngine(length=lambda _: 2), None, episodes(max_turns=2))
    name = runner.open(prompt(0), SAMPLING)
    with pytest.raises(ValueError, match=f"turn of episode '{name}' is still being sampled"):
        runner.extend(name, "too early")
    assert runner.extend(ended(runner).id, Observation(token_ids=(7,)))
    assert ended(runner).must_end
    assert not runner.extend(name, Observation(token_ids=(7,)))
    sample = runner.close(name, 1)
    assert (sample.stop_reason, sample.reward) == (StopReason.MAX_TURNS, Reward(total=1.0))
    assert [turn.end - turn.start for turn in sample.turns] == [2, 2]


def test_a_failure_never_becomes_a_reward() -> None:
    class Refused(Render):
        def __call__(self, sample: Sample, observation: Observation) -> Any:
            raise RenderError("the template has no such role")

    runner = Runner(FakeEngine(), None, episodes(render=Refused()))
    names = [runner.open(prompt(0), SAMPLING) for _ in range(2)]
    turns = dict.fromkeys(names)
    while None in turns.values():
        turns |= {sample.id: sample for sample in runner.step().turns}
    assert not runner.extend(names[0], [{"role": "narrator", "content": "and so"}])
    sample = runner.close(names[0], 1.0)
    assert (sample.failure, sample.reward) == (FailureKind.INVALID, None)
    assert sample.failure_detail == "env: the template has no such role"
    sample = runner.close(names[1], float("nan"))
    assert (sample.failure, sample.reward) == (FailureKind.INVALID, None)
    assert sample.failure_detail == "the reward is nan"
