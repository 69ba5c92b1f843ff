"""Measures live environments: many sessions whose tools wait, and many episodes with faults.

    python benchmarks/sessions.py waiting --sessions 256 --seconds 1
    python benchmarks/sessions.py faults --episodes 10000

`waiting` counts the calls a second of sessions whose tool sleeps, and compares them with the same
calls one after another. `faults` plays episodes of up to 20 turns over a hand-written engine, a
share of which loses a worker, raises, hangs, or answers nonsense; it counts how each ended, and
reads the memory of the driver, the processes and the files that are left.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from hone.rewards.scorer import Scorer
from hone.rewards.settings import RewardConfig
from hone.rollout.episodes import Episodes
from hone.rollout.requests import sampling_params
from hone.rollout.runner import Runner, RunningGroup
from hone.rollout.settings import EnvConfig, RolloutConfig
from hone.types import (
    Completion,
    EngineStats,
    Message,
    Observation,
    Prompt,
    Request,
    Sample,
    StopReason,
)

ENVS = '''
import os
import random
import time

from hone.envs import Observation


class Waiting:
    def __init__(self, seconds, turns):
        self.seconds, self.turns = seconds, turns

    def start(self, row):
        return None

    def step(self, action):
        time.sleep(self.seconds)
        return 1.0 if action.index + 1 == self.turns else Observation(token_ids=(5,))


class Faulty:
    """Chooses its fault from the row, and its length from the seed."""

    def __init__(self, folder):
        self.folder = folder

    def start(self, row):
        self.fault, self.path = row.task, f"{self.folder}/{row.prompt}"
        drawn = random.Random(row.seed)
        self.turns, self.at = drawn.randint(1, 20), drawn.randint(0, 3)
        self.is_again = os.path.exists(self.path)
        open(self.path, "a").close()

    def step(self, action):
        if action.index == min(self.at, self.turns - 1) and not self.is_again:
            if self.fault == "killed":
                os.kill(os.getpid(), 9)
            if self.fault == "raised":
                raise ConnectionError("the server answered 503")
            if self.fault == "slow":
                time.sleep(600)
        if self.fault == "nonsense":
            return {"reward": 1.0}
        if action.must_end or action.index + 1 == self.turns:
            return float(self.turns)
        return Observation(token_ids=(5,))

    def close(self):
        pass
'''
KINDS = ("none", "none", "none", "none", "none", "none", "killed", "raised", "slow", "nonsense")


class ScriptedEngine:
    """Ends each turn after one or two tokens, which its seed decides."""

    weight_version = 0

    def __init__(self) -> None:
        self._running: dict[str, Request] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        self._running |= {request.id: request for request in requests}

    def step(self) -> list[Completion]:
        ended = [self._completion(request) for request in self._running.values()]
        self._running.clear()
        return ended

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        return [self._completion(self._running.pop(request_id)) for request_id in request_ids]

    @property
    def has_unfinished(self) -> bool:
        return bool(self._running)

    def stats(self) -> EngineStats:
        return EngineStats()

    def _completion(self, request: Request) -> Completion:
        ids = [7] * (request.sampling.seed % 2 + 1)
        return Completion(
            request_id=request.id,
            token_ids=ids,
            logprobs=[-1.0] * len(ids),
            weight_versions=[0] * len(ids),
            stop_reason=StopReason.EOS,
        )


class Render:
    """Appends observations that are ids."""

    ends: Mapping[int, str] = {}
    num_cut = 0

    def __call__(
        self, sample: Sample, observation: Observation, /
    ) -> tuple[str, tuple[Message, ...], tuple[int, ...]]:
        del sample
        return "", (), observation.token_ids

    def opening(self, prompt: Prompt, observation: Observation, /) -> Prompt:
        del observation
        return prompt


def play(scorer: Scorer, tasks: Sequence[str]) -> list[Sample]:
    """An episode of each task."""
    episodes = Episodes(
        decode=lambda ids: " ".join(map(str, ids)), max_turns=scorer.max_turns, render=Render()
    )
    runner = Runner(ScriptedEngine(), scorer, episodes)
    sampling = sampling_params(RolloutConfig(max_completion_tokens=200), ())
    runner.submit(
        RunningGroup.of(
            Prompt(id=f"row:{order}", token_ids=(1, 2), text=f"row-{order}", task=task),
            sampling,
            episodes,
            group_id=f"row-{order}",
            indices=[0],
            order=order,
        )
        for order, task in enumerate(tasks)
    )
    ended: list[Sample] = []
    while runner.groups:
        ended += [sample for entry in runner.step().groups for sample in entry.group.samples]
    return ended


def waiting(num_sessions: int, seconds: float, turns: int) -> None:
    """Print calls a second of sessions whose tools sleep."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "envs.py").write_text(ENVS)
        env = EnvConfig(
            path=f"{folder}/envs.py:Waiting",
            args={"seconds": seconds, "turns": turns},
            max_turns=turns,
            concurrency=num_sessions,
        )
        with Scorer(RewardConfig(functions=()), max_completion_tokens=200, env=env) as scorer:
            for name in ("first", "second"):
                start = time.perf_counter()
                ended = play(scorer, ["none"] * num_sessions)
                took = time.perf_counter() - start
                assert all(sample.valid for sample in ended)
                rate, alone = num_sessions * turns / took, 1 / seconds
                print(
                    f"{name} round: {num_sessions} sessions of {turns} calls of {seconds:g} s in "
                    f"{took:.2f} s: {rate:.1f} calls/s, {rate / alone:.0f} times one after another"
                )


def faults(num_episodes: int, concurrency: int) -> None:
    """Print how episodes with faults ended, and what is left of them."""
    drawn = random.Random(0)
    tasks = [drawn.choice(KINDS) for _ in range(num_episodes)]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "envs.py").write_text(ENVS)
        env = EnvConfig(
            path=f"{folder}/envs.py:Faulty",
            args={"folder": folder},
            max_turns=20,
            turn_timeout_s=1.0,
            concurrency=concurrency,
        )
        driver = psutil.Process()
        rewards = RewardConfig(functions=(), max_failure_rate=1.0)
        with Scorer(rewards, max_completion_tokens=200, env=env) as scorer:
            start, size = time.perf_counter(), 500
            for first in range(0, num_episodes, size):
                part = tasks[first : first + size]
                for file in Path(folder).glob("row-*"):
                    file.unlink()
                ended = play(scorer, part)
                assert sorted(sample.id for sample in ended) == sorted(
                    f"row-{number}/0" for number in range(len(part))
                )
                outcomes = Counter(
                    (sample.prompt.task, sample.attempt, str(sample.failure or "scored"))
                    for sample in ended
                )
                for sample in ended:
                    is_scored = sample.prompt.task != "nonsense"
                    assert sample.valid is is_scored, (sample.prompt.task, sample.failure_detail)
                    reward = sample.reward.total if sample.reward is not None else None
                    assert reward != 0.0, "a failure counted as a zero"
                print(
                    f"{first + len(part):,} episodes in {time.perf_counter() - start:.0f} s: "
                    f"{driver.memory_info().rss / 2**20:.0f} MiB, {driver.num_fds()} files, "
                    f"{len(driver.children(recursive=True))} processes; {dict(outcomes)}"
                )
            print(f"played again: {scorer.stats().num_restarts:,}")
        print(f"left behind: {len(driver.children(recursive=True))} processes")


def main() -> None:
    """Run the part that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parts = parser.add_subparsers(dest="part", required=True)
    one = parts.add_parser("waiting")
    one.add_argument("--sessions", type=int, default=256)
    one.add_argument("--seconds", type=float, default=1.0)
    one.add_argument("--turns", type=int, default=4)
    other = parts.add_parser("faults")
    other.add_argument("--episodes", type=int, default=10_000)
    other.add_argument("--concurrency", type=int, default=32)
    args = parser.parse_args()
    if args.part == "waiting":
        waiting(args.sessions, args.seconds, args.turns)
    else:
        faults(args.episodes, args.concurrency)


if __name__ == "__main__":
    main()
