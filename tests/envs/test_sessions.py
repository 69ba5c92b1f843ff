"""Sessions: live objects of an episode, against the same environment without memory of its own, and
what happens where they fail."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hone.config.run import EvalConfig
from hone.config.tree import RLConfig
from hone.loops import reinforce
from hone.rewards.scorer import Scorer
from hone.rewards.settings import RewardConfig
from hone.rollout.episodes import Episodes
from hone.rollout.evaluate import evaluate
from hone.rollout.requests import sampling_params
from hone.rollout.runner import Runner, RunningGroup
from hone.rollout.settings import EnvConfig, RolloutConfig
from hone.types import FailureKind, Group, Prompt, Reward, Sample
from tests.rollout.fakes import FakeEngine, prompt, render
from tests.tiny_runs import lines, tiny_config, write_inputs

ENVS = '''
import os
import threading
import time
from pathlib import Path

from hone.envs import Observation
from hone.envs.session import End


def answer(turns, last=4):
    said, even = f"={len(turns[-1])}=", sum(c in "02468" for c in turns[-1]) / 3
    if len(turns) > 1 and (len(turns) == last or turns[-1][:1] in "02468"):
        return even
    return Observation(said, role=None, reward=even, max_tokens=3)


class Stateless:
    def step(self, episode):
        return answer(episode.turns)


class Live:
    def start(self, row):
        self.turns = []

    async def step(self, action):
        assert action.index == len(self.turns)
        self.turns.append(action.text)
        return answer(self.turns)


class Opened(Live):
    def start(self, row):
        super().start(row)
        return f"{row.seed % 7}="


class Faulty:
    """Does in its second turn what its row says, in its first attempt or always."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def start(self, row):
        self.name, self.what, self.often = row.prompt, row.task, row.answer
        self.turns = 0
        with open(self.folder / f"{self.name}.started", "a") as file:
            file.write(f"{os.getpid()}\\n")
        is_first = len((self.folder / f"{self.name}.started").read_text().split()) == 1
        self.fails = self.often == "always" or (self.often == "once" and is_first)

    def step(self, action):
        self.turns += 1
        if self.turns == 2 and self.fails:
            if self.what == "exit":
                os._exit(3)
            if self.what == "raise":
                raise ConnectionError("the server answered 503")
            if self.what == "hang":
                time.sleep(600)
            if self.what == "memory":
                bytearray(1 << 40)
            if self.what == "nonsense":
                return {"reward": 1.0}
            if self.what == "after":
                threading.Timer(0.0, os._exit, [4]).start()
        if action.must_end or self.turns == 4:
            return End(score=float(self.turns), truncated=self.what == "cut")
        return Observation(token_ids=(5,))

    def close(self):
        with open(self.folder / f"{self.name}.closed", "a") as file:
            file.write(f"{self.turns}\\n")
'''
AHEAD: dict[str, Any] = {
    "pipeline": {"max_staleness": 2},
    "algorithm": {"correction": {"kind": "tis"}},
}
CARRIED: dict[str, Any] = {"rollout": {"oversample_prompts": 3}}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sessions")
    write_inputs(folder)
    (folder / "envs.py").write_text(ENVS)
    return folder


def configured(inputs: Path, folder: Path, name: str, **sections: Any) -> RLConfig:
    rollout = {"prompts_per_step": 4, "n_samples_per_prompt": 4, "max_completion_tokens": 48}
    return tiny_config(
        inputs,
        folder,
        **{
            "log": {"to": [], "samples_per_step": 999},
            "env": {"path": f"{inputs / 'envs.py'}:{name}"},
            "reward": {"functions": [], "num_workers": 2},
            "run": {"dir": folder, "steps": 3},
            "eval": {"every_n_steps": 2, "max_completion_tokens": 12},
        }
        | sections
        | {"rollout": rollout | sections.get("rollout", {})},
    )


def samples_of(cfg: RLConfig) -> list[dict[str, Any]]:
    reinforce.run(cfg)
    return lines(cfg.run.dir / "samples.jsonl")


def discrete(sample: dict[str, Any]) -> dict[str, Any]:
    """All but numbers whose last bits depend on what else was in a batch."""
    rounded = ("advantage", "logprobs", "trainer_logprobs")
    return {name: value for name, value in sample.items() if name not in rounded}


@pytest.mark.parametrize(
    "sections",
    [
        {},
        CARRIED,
    ],
    ids=["in turn", "carried over"],
)
def test_a_session_plays_the_episode_of_an_environment_without_memory(
    inputs: Path, tmp_path: Path, sections: dict[str, Any]
) -> None:
    """Token for token, through interruptions and an evaluation in between."""
    stateless, live = (
        samples_of(configured(inputs, tmp_path / name, name, **sections))
        for name in ("Stateless", "Live")
    )
    assert [discrete(sample) for sample in live] == [discrete(sample) for sample in stateless]
    assert max(len(sample["turns"]) for sample in live) > 2


@pytest.mark.parametrize("sections", [AHEAD, CARRIED], ids=["ahead", "carried over"])
def test_sessions_live_over_changes_of_weights(
    inputs: Path, tmp_path: Path, sections: dict[str, Any]
) -> None:
    """With few sessions at a time."""
    env = {"path": f"{inputs / 'envs.py'}:Live", "concurrency": 5}
    samples = samples_of(configured(inputs, tmp_path, "Live", env=env, **sections))
    train = [sample for sample in samples if sample["split"] == "train"]
    assert len(train) == 3 * 4 * 4
    assert all(sample["failure"] is None for sample in samples)


def test_an_opening_is_part_of_the_prompt(inputs: Path, tmp_path: Path) -> None:
    """The first step of a run compares the log-probabilities of engine and trainer."""
    cfg = configured(
        inputs, tmp_path, "Opened", checkpoint={"every_n_steps": 1}, trainer={"parity": 1e-6}
    )
    for sample in samples_of(cfg):
        assert sample["prompt"][-1] == "="
        assert sample["prompt"][-2] in "0123456"
        assert sample["prompt"].count("=") == 2


# -- failures ------------------------------------------------------------------------------------

KINDS = {
    "exit": FailureKind.CRASH,
    "raise": FailureKind.EXCEPTION,
    "hang": FailureKind.TIMEOUT,
    "memory": FailureKind.OUT_OF_MEMORY,
    "after": FailureKind.CRASH,
}
FAULTS = (*KINDS, "nonsense", "none", "cut")


class Played(NamedTuple):
    samples: dict[str, Sample]
    num_restarts: int
    num_failed: Mapping[FailureKind, int]
    sessions: dict[str, int]
    """Sessions started, by fault."""
    closed: dict[str, int]


def played(folder: Path, *, often: str, **env: Any) -> Played:
    """An episode of each fault, named by it, through a real scorer."""
    folder.mkdir()
    (folder / "envs.py").write_text(ENVS)
    settings = {"turn_timeout_s": 2.0, "args": {"folder": str(folder)}} | env
    cfg = EnvConfig(path=f"{folder / 'envs.py'}:Faulty", **settings)
    sampling = sampling_params(RolloutConfig(max_completion_tokens=60), ())
    rewards = RewardConfig(functions=(), num_workers=1, memory_limit_gib=1.0)
    with Scorer(rewards, max_completion_tokens=60, env=cfg) as scorer:
        episodes = Episodes(
            decode=lambda ids: " ".join(map(str, ids)),
            max_turns=scorer.max_turns,
            render=render,
            run_seed=3,
        )
        runner = Runner(FakeEngine(end_every=3), scorer, episodes)
        runner.submit(
            RunningGroup.of(
                replace(prompt(order), id=fault, text=fault, task=fault, answer=often),
                sampling,
                episodes,
                group_id=fault,
                indices=[0],
                order=order,
            )
            for order, fault in enumerate(FAULTS)
        )
        ended: list[Group] = []
        while runner.groups:
            ended += [entry.group for entry in runner.step().groups]
        assert runner.num_undecided == 0
        assert not runner.has_requests
        assert scorer.sessions is not None
        assert not len(scorer.sessions)
        stats = scorer.stats()

    def lines_of(kind: str) -> dict[str, int]:
        files = {fault: folder / f"{fault}.{kind}" for fault in FAULTS}
        return {f: len(x.read_text().split()) if x.exists() else 0 for f, x in files.items()}

    return Played(
        {group.id: group.samples[0] for group in ended},
        stats.num_restarts,
        stats.num_failed,
        lines_of("started"),
        lines_of("closed"),
    )


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """Each fault happens in the first attempt alone."""
    return played(tmp_path_factory.mktemp("once") / "run", often="once")


def test_a_lost_session_is_played_again_with_the_same_seed(once: Played, tmp_path: Path) -> None:
    straight = played(tmp_path / "straight", often="never")
    for fault in KINDS:
        sample = once.samples[fault]
        assert sample.failure is None, (fault, sample.failure_detail)
        assert sample.attempt == 1, fault
        assert once.sessions[fault] == 2
    assert once.num_restarts == len(KINDS)
    for fault, sample in straight.samples.items():
        assert sample.reward == Reward(total=4.0, parts={"env": 4.0})
        assert sample.attempt == 0
        if fault != "nonsense":
            assert once.samples[fault].token_ids == sample.token_ids, fault
            assert once.samples[fault].reward == sample.reward
    assert straight.samples["cut"].truncated
    assert not straight.samples["none"].truncated


def test_a_session_that_is_always_lost_fails_its_sample_alone(tmp_path: Path) -> None:
    always = played(tmp_path / "always", often="always", retries=2)
    failures = {fault: sample.failure for fault, sample in always.samples.items()}
    assert failures == KINDS | {"nonsense": FailureKind.INVALID, "none": None, "cut": None}
    assert {fault: always.sessions[fault] for fault in KINDS} == dict.fromkeys(KINDS, 3)
    assert all(sample.valid is (sample.failure is None) for sample in always.samples.values())


def test_what_a_session_answers_wrongly_is_not_tried_again(once: Played) -> None:
    assert once.samples["nonsense"].failure is FailureKind.INVALID
    assert once.sessions["nonsense"] == 1


def test_a_session_is_closed_once_unless_its_process_is_gone(once: Played) -> None:
    killed = {"exit": 1, "hang": 1, "after": 1}
    for fault in FAULTS:
        assert once.closed[fault] == once.sessions[fault] - killed.get(fault, 0), fault


@pytest.mark.parametrize("num_turns", [0, 1], ids="stopped after {} turns".format)
def test_a_stopped_evaluation_closes_its_own_sessions_at_once(
    tmp_path: Path, num_turns: int
) -> None:
    """Those of the training's episodes, which rest meanwhile, go on where they were."""
    (tmp_path / "envs.py").write_text(ENVS)
    cfg = EnvConfig(path=f"{tmp_path / 'envs.py'}:Faulty", args={"folder": str(tmp_path)})
    sampling = sampling_params(RolloutConfig(max_completion_tokens=60), ())

    def named(name: str, order: int) -> Prompt:
        return replace(prompt(order), id=name, text=name, task="none", answer="never")

    def num_started(*names: str) -> int:
        return sum((tmp_path / f"{name}.started").exists() for name in names)

    trained, evaluated = ["train-0", "train-1"], ["held-out-0", "held-out-1", "held-out-2"]
    rewards = RewardConfig(functions=(), num_workers=2, memory_limit_gib=1.0)
    with Scorer(rewards, max_completion_tokens=60, env=cfg) as scorer:
        assert scorer.sessions is not None

        def episodes(purpose: str) -> Episodes:
            return Episodes(
                decode=lambda ids: " ".join(map(str, ids)),
                max_turns=scorer.max_turns,
                render=render,
                run_seed=3,
                purpose=purpose,
            )

        engine, of_training = FakeEngine(end_every=3), episodes("rollout")
        runner = Runner(engine, scorer, of_training)
        groups = [
            RunningGroup.of(
                named(name, order),
                sampling,
                of_training,
                group_id=name,
                indices=[0],
                order=order,
            )
            for order, name in enumerate(trained)
        ]
        runner.submit(groups)
        while num_started(*trained) < 2:
            runner.poll(0.01)
        runner.withdraw()
        while scorer.pending:
            runner.poll(0.01)
        num_before = len(engine.submitted)

        def is_enough() -> bool:
            turns = len(engine.submitted) - num_before
            return num_started(*evaluated) == 3 and turns >= 3 * num_turns

        samples = evaluate(
            [named(name, order) for order, name in enumerate(evaluated)],
            engine=engine,
            scorer=scorer,
            cfg=EvalConfig(max_completion_tokens=60),
            episodes=episodes("eval"),
            should_stop=is_enough,
        )
        assert samples is None
        assert not engine.has_unfinished
        assert len(scorer.sessions) == 2, "those of training"
        deadline = time.monotonic() + 60
        while not all((tmp_path / f"{name}.closed").exists() for name in evaluated):
            assert time.monotonic() < deadline, "their objects are not closed"
            scorer.poll(0.01)
        assert not any((tmp_path / f"{name}.closed").exists() for name in trained)

        runner.resume(groups)
        while runner.groups:
            runner.step()
        assert [entry.group.samples[0].reward for entry in groups] == [
            Reward(total=4.0, parts={"env": 4.0})
        ] * 2
        for name in trained:
            assert len((tmp_path / f"{name}.started").read_text().split()) == 1, "not played again"
