"""R21: any number of processes collects the same groups as one. Processes are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from hone.config.run import EvaluationConfig
from hone.rewards.environment import EnvFacts
from hone.rewards.settings import RewardConfig
from hone.rollout import collector as collector_module
from hone.rollout.collector import Collector, SingleProcess
from hone.rollout.episodes import Episodes
from hone.rollout.evaluate import evaluate
from hone.rollout.judge import RewardModelScorer
from hone.rollout.state import group_to_dict
from hone.rollout.transcripts import Transcript
from hone.types import Request, Sample
from tests.rollout.fakes import (
    CyclicPrompts,
    FakeEngine,
    FakeScorer,
    collect,
    draw,
    make_collector,
    play,
    prompt,
    render,
)
from tests.tables import table

NUM_STEPS = 5
TIMEOUT_S = 60.0


@dataclass
class Meeting:
    """Where threads leave a value each and take everybody's."""

    size: int
    values: list[Any] = field(default_factory=list[Any])

    def __post_init__(self) -> None:
        self.values = [None] * self.size
        self.barrier = threading.Barrier(self.size)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait(TIMEOUT_S)
        values = list(self.values)
        self.barrier.wait(TIMEOUT_S)
        return values


@dataclass
class Thread:
    """The `Comm` protocol over a meeting."""

    meeting: Meeting
    rank: int

    @property
    def size(self) -> int:
        return self.meeting.size

    def gather(self, value: Any, /) -> list[Any]:
        return self.meeting.gather(self.rank, value)

    def total(self, *counts: int) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self.gather(counts), strict=True)))


def in_threads(size: int, work: Callable[[Thread], Any]) -> list[Any]:
    meeting = Meeting(size)

    def run(rank: int) -> Any:
        try:
            return work(Thread(meeting, rank))
        except BaseException:
            meeting.barrier.abort()  # nobody waits for one that has failed
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        errors = [e for future in futures if (e := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]


class AtMeetings(FakeScorer):
    """Scores a sample when all processes meet, the first time or a later one, as where a function
    returns it late; so samples of groups that are carried over may be left behind."""

    def __init__(self, comm: Any) -> None:
        super().__init__(delay=40)
        self.comm = comm
        self._scored: list[tuple[int, Sample]] = []

    def meet(self, is_waiting: bool) -> bool:
        self._scored += [(0, sample) for left, sample in self._waiting if left == 0]
        self._waiting = [(left - 1, sample) for left, sample in self._waiting if left]
        return any(self.comm.gather(is_waiting))

    def poll(self, timeout_s: float = 0.0) -> list[Sample]:
        waiting, self._waiting = self._waiting, self._scored
        found = super().poll(timeout_s)
        self._waiting, self._scored = waiting, []
        return found

    @property
    def pending(self) -> int:
        return len(self._waiting) + len(self._scored)


def make(
    settings: dict[str, Any], comm: Any, prompts: CyclicPrompts, *, meets: bool = False
) -> Collector:
    judge = AtMeetings(comm)
    scorer = judge if meets else FakeScorer(delay=3)
    collector = make_collector(scorer=scorer, prompts=prompts, comm=comm, **settings)
    if meets:
        collector.meet = judge.meet
    return collector


def collected(
    settings: dict[str, Any], comm: Any, num_steps: int = NUM_STEPS, *, meets: bool = False
) -> list[Any]:
    """The groups of each step, with the weights of a version of their own, and the last state."""
    prompts = CyclicPrompts()
    collector = make(settings, comm, prompts, meets=meets)
    found: list[Any] = []
    for step in range(num_steps):
        groups = collect(collector, step)
        counts = collector.counts
        found.append(
            (
                [group_to_dict(group) for group in groups],
                prompts.position,
                counts.num_dropped_groups,
                counts.num_refill_rounds,
                counts.num_carried_samples,
                counts.num_prompt_tokens,
                counts.num_generated_tokens,
            )
        )
    return [*found, collector.state_dict()]


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fewer prompts than processes": {"prompts_per_step": 3},
    "dynamic": {"dynamic_sampling": True},
    "oversampled": {"oversample_prompts": 5},
    "oversampled, patient": {"oversample_prompts": 5, "max_aborted_count": 1},
    "dynamic, oversampled": {"dynamic_sampling": True, "oversample_prompts": 3},
    "masked": {"oversample_prompts": 5, "mask_off_policy_tokens": True},
}


def config(name: str) -> dict[str, Any]:
    base = {"prompts_per_step": 8, "n_samples_per_prompt": 4, "max_completion_tokens": 20}
    return base | SETTINGS[name]


@table("size", [2, 4])
@table("name", SETTINGS)
def test_R21_processes_collect_what_one_does(name: str, size: int) -> None:
    alone = collected(config(name), SingleProcess())
    for own in in_threads(size, lambda comm: collected(config(name), comm)):
        assert own == alone
    if "oversampled" in name:
        assert any(step[4] for step in alone[:-1]), "something must be carried over"
    if "dynamic" in name:
        assert any(step[2] for step in alone[:-1]), "something must be dropped"


@table("size", [2, 4])
@table("name", SETTINGS)
def test_R21_processes_that_score_when_all_meet_collect_what_one_does(name: str, size: int) -> None:
    """A process without a group comes to every meeting too."""
    alone = collected(config(name), SingleProcess(), meets=True)
    for own in in_threads(size, lambda comm: collected(config(name), comm, meets=True)):
        assert own == alone
    # The order in which samples of unfinished groups were scored is in the state alone.
    assert alone[:-1] == collected(config(name), SingleProcess())[:-1]


class ModelAtMeetings:
    """A reward model that scores what has been asked when all processes meet."""

    busy_s = 0.0

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._asked: list[tuple[Sequence[Transcript], Future[list[float]]]] = []

    def begin(self, sequences: Sequence[Transcript]) -> Future[list[float]]:
        scores = Future[list[float]]()
        self._asked.append((sequences, scores))
        return scores

    def meet(self, is_waiting: bool) -> bool:
        asked, self._asked = self._asked, []
        for sequences, scores in asked:
            scores.set_result([float(draw("score", *x.token_ids) % 5) for x in sequences])
        return any(self._comm.gather(is_waiting))


class WholeText:
    """Transcripts of the tokens of an episode."""

    max_tokens = 999

    def of_sample(self, sample: Sample) -> Transcript:
        return Transcript((*sample.prompt.token_ids, *sample.token_ids))


class Impatient(FakeScorer):
    """Plays episodes, and fails where it is polled on and on before the processes meet."""

    def __init__(self) -> None:
        super().__init__(delay=3, answer=play)
        self.environment = EnvFacts(shape="stateless", has_sessions=False)
        self.num_polls = 0

    def poll(self, timeout_s: float = 0.0) -> list[Sample]:
        self.num_polls += 1
        assert self.num_polls < 200, "they never meet"
        return super().poll(timeout_s)


def judged_episodes(comm: Any) -> tuple[Any, Callable[[bool], bool]]:
    """The scorer of episodes that a shared model judges, and how it meets."""
    model, functions, transcripts = ModelAtMeetings(comm), Impatient(), cast("Any", WholeText())
    scorer = RewardModelScorer(model, transcripts, functions, RewardConfig())

    def meet(is_waiting: bool) -> bool:
        functions.num_polls = 0
        scorer.begin_passes()
        return model.meet(is_waiting)

    return scorer, meet


def judged_steps(name: str, comm: Any) -> list[Any]:
    scorer, meet = judged_episodes(comm)
    collector = make_collector(scorer=scorer, comm=comm, **config(name))
    collector.meet = meet
    steps = [collect(collector, step) for step in range(NUM_STEPS)]
    assert all(one.reward for groups in steps for group in groups for one in group.samples)
    return [[group_to_dict(group) for group in groups] for groups in steps]


def judged_evaluation(comm: Any) -> list[Any]:
    scorer, meet = judged_episodes(comm)
    samples = evaluate(
        [prompt(number) for number in range(3)],
        engine=FakeEngine(),
        scorer=scorer,
        cfg=EvaluationConfig(n_samples_per_prompt=3, max_completion_tokens=20),
        episodes=Episodes(decode=str, max_turns=4, render=render, run_seed=3, purpose="eval"),
        comm=comm,
        meet=meet,
    )
    assert samples is not None
    assert any(len(one.turns) > 1 for one in samples)
    return [(one.id, one.token_ids, one.reward) for one in samples]


@table("name", ["plain", "dynamic", "oversampled, patient", "evaluation"])
def test_R21_processes_that_share_a_model_meet_when_episodes_have_ended(name: str) -> None:
    """An episode that its environment has ended waits for no engine, which may be another one's."""

    def work(comm: Any) -> list[Any]:
        return judged_evaluation(comm) if name == "evaluation" else judged_steps(name, comm)

    alone = work(SingleProcess())
    for size in (2, 4):
        for own in in_threads(size, work):
            assert own == alone


@pytest.mark.parametrize("sizes", [(2, 1), (1, 4), (4, 2)])
def test_R18_a_rollout_goes_on_in_any_number_of_processes(sizes: tuple[int, int]) -> None:
    cfg = config("dynamic, oversampled")

    def first_half(comm: Any) -> Any:
        return collected(cfg, comm, num_steps=2)[-1]

    def second_half(state: Any, position: int) -> Callable[[Any], Any]:
        def work(comm: Any) -> list[Any]:
            prompts = CyclicPrompts()
            prompts.position = position
            collector = make(cfg, comm, prompts)
            collector.load_state_dict(state)
            return [group_to_dict(group) for group in collect(collector, 2)]

        return work

    straight = collected(cfg, SingleProcess(), num_steps=3)
    states = in_threads(sizes[0], first_half)
    resumed = in_threads(sizes[1], second_half(states[-1], straight[1][1]))
    for groups in resumed:
        assert groups == straight[2][0]


def bug_local_counts(self: Collector, num_groups: int) -> bool:
    """Each process decides by its own groups, and would be left alone by the others."""
    generated = sum(entry.generated for entry in self._own())
    return generated < num_groups and bool(self.comm.total(self.engine.has_unfinished)[0])


def bug_own_seeds(self: Episodes, *args: Any, number: int) -> Any:
    del number
    return unbroken_first_request(self, *args, number=id(threading.current_thread()))


def without_tokens(entry: Any) -> dict[int, Request]:
    return {index: replace(one, resumed=None) for index, one in entry.requests.items()}


unbroken_first_request = Episodes.first_request


@pytest.mark.parametrize("bug", ["counts", "seeds", "tokens"])
def test_R21_planted_sharing(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = collected(config("oversampled"), SingleProcess())
    if bug == "counts":
        monkeypatch.setattr(Collector, "_must_step", bug_local_counts)
    elif bug == "seeds":
        monkeypatch.setattr(Episodes, "first_request", bug_own_seeds)
    else:  # what was sampled of an unfinished sample stays with its owner
        update = collector_module._GroupUpdate
        monkeypatch.setattr(
            update, "of", classmethod(lambda cls, e: cls([], without_tokens(e), {}))
        )

    def check() -> None:
        for own in in_threads(2, lambda comm: collected(config("oversampled"), comm)):
            assert own == alone

    with pytest.raises((AssertionError, KeyError, threading.BrokenBarrierError)):
        check()


def evaluated(
    comm: Any,
    num_prompts: int,
    *,
    meets: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Any] | None:
    judge = AtMeetings(comm)
    samples = evaluate(
        [prompt(number) for number in range(num_prompts)],
        engine=FakeEngine(),
        scorer=judge if meets else FakeScorer(delay=2),
        cfg=EvaluationConfig(n_samples_per_prompt=3, max_completion_tokens=9),
        episodes=Episodes(decode=lambda ids: str(list(ids)), run_seed=3, purpose="eval"),
        comm=comm,
        meet=judge.meet if meets else bool,
        should_stop=should_stop,
    )
    return samples and [(s.id, s.prompt, s.token_ids, s.reward, s.index) for s in samples]


@pytest.mark.parametrize(("size", "num_prompts"), [(2, 5), (4, 2), (3, 9)])
def test_R24_an_evaluation_is_the_same_in_any_number_of_processes(
    size: int, num_prompts: int
) -> None:
    alone = evaluated(SingleProcess(), num_prompts)
    assert alone is not None
    assert len(alone) == 3 * num_prompts
    for meets in (False, True):
        for own in in_threads(size, lambda comm, m=meets: evaluated(comm, num_prompts, meets=m)):
            assert own == alone


@pytest.mark.parametrize("after", [0, 4, 100])
def test_one_that_stops_an_evaluation_comes_to_the_meetings_of_the_others(after: int) -> None:
    """Whether it stops while it samples or while the others wait for scores."""

    def work(comm: Thread) -> Any:
        steps = iter(range(after if comm.rank == 0 else 10**6))
        stops = lambda: next(steps, None) is None  # noqa: E731
        return evaluated(comm, 6, meets=True, should_stop=stops)

    found = in_threads(3, work)
    assert all(own == found[0] for own in found)
    assert (found[0] is None) == (after < 100)
