"""A hand-written engine and scorer with the real protocols: one token a step, no model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hone.data.turns import Appended
from hone.model_input import TEXT
from hone.rewards.environment import EnvFacts
from hone.rewards.scorer import ScorerStats
from hone.rollout.collector import Collector, SingleProcess
from hone.rollout.settings import PipelineConfig, RolloutConfig
from hone.types import (
    Completion,
    EngineStats,
    FailureKind,
    Group,
    Observation,
    Prompt,
    Request,
    Reward,
    Sample,
    SamplingParams,
    StopReason,
)


def draw(*key: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest(), "big")


def prompt(number: int) -> Prompt:
    return Prompt(id=f"data:{number}", token_ids=(1, 2, number % 50), text=str(number))


class CyclicPrompts:
    """The part of a prompt stream that a rollout uses."""

    def __init__(self) -> None:
        self.position = 0

    def take(self, num: int, *, step: int) -> list[Prompt]:
        prompts = self.peek(num, step=step)
        self.position += num
        return prompts

    def peek(self, num: int, *, step: int) -> list[Prompt]:
        del step
        return [prompt(number) for number in range(self.position, self.position + num)]


class FakeEngine:
    """Token t of a request depends on (seed, t) alone; one in `end_every` positions ends it, or
    else `length` says how many tokens it gets."""

    def __init__(
        self, *, end_every: int = 6, length: Callable[[Request], int] | None = None
    ) -> None:
        self.weight_version = 0
        self.end_every = end_every
        self.length = length
        self.submitted: list[Request] = []
        self.num_steps = self.num_generated_tokens = 0
        self._running: dict[str, tuple[Request, Completion]] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            assert request.id not in self._running
            self.submitted.append(request)
            earlier = request.resumed
            self._running[request.id] = (
                request,
                Completion(
                    request_id=request.id,
                    token_ids=list(earlier.token_ids) if earlier else [],
                    logprobs=list(earlier.logprobs) if earlier else [],
                    weight_versions=list(earlier.weight_versions) if earlier else [],
                    stop_reason=StopReason.ABORT,
                ),
            )

    def step(self) -> list[Completion]:
        finished = []
        self.num_steps += 1
        self.num_generated_tokens += len(self._running)
        for request, completion in list(self._running.values()):
            value = draw(request.sampling.seed, len(completion.token_ids))
            completion.token_ids.append(value % 50)
            completion.logprobs.append(-1.0 - value % 7 / 7)
            completion.weight_versions.append(self.weight_version)
            if self._ends(request, value, len(completion.token_ids)):
                completion.stop_reason = StopReason.EOS
            elif len(completion.token_ids) == request.sampling.max_tokens:
                completion.stop_reason = StopReason.LENGTH
            else:
                continue
            finished.append(completion)
            del self._running[request.id]
        return finished

    def _ends(self, request: Request, value: int, num_tokens: int) -> bool:
        if self.length is not None:
            return num_tokens == self.length(request)
        return value % self.end_every == 0

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        return [self._running.pop(request_id)[1] for request_id in request_ids]

    @property
    def has_unfinished(self) -> bool:
        return bool(self._running)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._running),
            kv_cache_usage=min(len(self._running) / 100, 1.0),
            num_generated_tokens=self.num_generated_tokens,
            num_steps=self.num_steps,
            busy_s=float(self.num_steps),
        )


class LateEngine(FakeEngine):
    """Returns what has finished a step later, and passes it over in `abort`, as engines do that
    compute ahead."""

    def __init__(self, *, length: Callable[[Request], int]) -> None:
        super().__init__(length=length)
        self._late: list[Completion] = []

    def step(self) -> list[Completion]:
        ready, self._late = self._late, super().step()
        return ready

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        return super().abort([name for name in request_ids if name in self._running])

    @property
    def has_unfinished(self) -> bool:
        return bool(self._running or self._late)


def by_first_token(sample: Sample) -> float:
    return float(sample.token_ids[0] % 2)


class Render:
    """Of observations that are token ids, and of openings that are digits."""

    ends: Mapping[int, str] = {}
    num_cut = 0

    def __call__(self, sample: Sample, observation: Observation) -> Appended:
        del sample
        return Appended("", (), observation.token_ids, TEXT)

    def opening(self, prompt: Prompt, observation: Observation) -> Prompt:
        assert isinstance(observation.content, str)
        token_ids = (*prompt.token_ids, *map(int, observation.content))
        return replace(prompt, text=prompt.text + observation.content, token_ids=token_ids)


render = Render()


def play(sample: Sample) -> Observation | None:
    """An environment of one to four turns, whose answers depend on what was sampled."""
    drawn = draw("turn", sample.seed, sample.index, *sample.token_ids)
    if sample.must_end or drawn % 4 == 0:
        return None
    return Observation(
        token_ids=(7, drawn % 50), max_tokens=drawn % 3 + 1, reward=0.5, state=[drawn]
    )


def in_group(total: float, totals: Sequence[float]) -> float:
    """What a function of whole groups gives: the share of the group with another own score."""
    return sum(total != other for other in totals) / len(totals)


class FakeScorer:
    """Scores at the n-th poll after submission, in an order of its own; where there is an `answer`,
    the sample goes on with it. One that takes whole groups adds `in_group` to those that `scores`
    says that functions score: all, where it is not given."""

    def __init__(
        self,
        reward: Callable[[Sample], float] = by_first_token,
        *,
        delay: int = 0,
        fails: Callable[[Sample], FailureKind | None] = lambda _: None,
        takes_whole_groups: bool = False,
        answer: Callable[[Sample], Observation | None] | None = None,
        scores: Callable[[Sample], bool] = lambda _: True,
    ) -> None:
        self.max_turns = 1 if answer is None else 4
        self.answer = answer
        self.sessions = self.requests = None
        self.environment: EnvFacts | None = None
        self.max_turn_tokens = None
        self.takes_whole_groups = takes_whole_groups
        self.scores = scores
        self.reward, self.delay, self.fails = reward, delay, fails
        self.compared: list[list[str]] = []
        """Ids of the samples of each call with a group."""
        self._waiting: list[tuple[int, Sample]] = []

    def submit(self, *samples: Sample) -> None:
        for sample in samples:
            assert sample.reward is None
            self._waiting.append((draw("delay", sample.id) % (self.delay + 1), sample))

    def compare(self, samples: Sequence[Sample]) -> None:
        totals = [
            sample.reward.total for sample in samples if sample.awaits_group and sample.reward
        ]
        assert len(totals) == len(samples)
        self.compared.append([sample.id for sample in samples])
        delay = draw("delay", *self.compared[-1]) % (self.delay + 1)
        for sample, total in zip(samples, totals, strict=True):
            parts = {"fake": total, "group": (place := in_group(total, totals))}
            sample.reward = Reward(total=total + place, parts=parts)
            self._waiting.append((delay, sample))

    def poll(self, timeout_s: float = 0.0) -> list[Sample]:
        del timeout_s
        ready = [sample for left, sample in self._waiting if left == 0]
        self._waiting = [(left - 1, sample) for left, sample in self._waiting if left]
        for sample in ready:
            if sample.reward is not None:  # it comes from `compare`
                continue
            sample.failure = sample.failure or self.fails(sample)
            if self.answer is not None and sample.failure is None:
                sample.observation = self.answer(sample)
            if sample.failure is None and sample.observation is None:
                total = self.reward(sample)
                is_partial = self.takes_whole_groups and self.scores(sample)
                sample.reward = Reward(total=total, parts={"fake": total}, is_partial=is_partial)
        return sorted(ready, key=lambda sample: draw("order", sample.id))

    def begin(self, sample: Sample, sampling: SamplingParams) -> None:
        del sampling
        self.submit(sample)

    def take_decided(self) -> list[Sample]:
        return []

    def rest(self) -> list[Sample]:
        return []

    def wake(self) -> None:
        pass

    def cancel(self) -> None:
        self._waiting.clear()

    @property
    def pending(self) -> int:
        return len(self._waiting)

    def stats(self) -> ScorerStats:
        return ScorerStats(
            num_scored=0,
            num_failed={},
            num_pending=self.pending,
            num_kills=0,
            p99_s=math.nan,
        )


def collect(collector: Collector, version: int) -> list[Group]:
    """The groups of the update from `version` to the next, by a fake engine that holds it."""
    collector.engine.weight_version = version  # type: ignore[misc]
    return collector.collect(version + 1)


def make_collector(
    *,
    engine: FakeEngine | None = None,
    scorer: FakeScorer | None = None,
    prompts: CyclicPrompts | None = None,
    pipeline: dict[str, Any] | None = None,
    comm: Any = None,
    on_scored: Callable[[Group], None] | None = None,
    **rollout: Any,
) -> Collector:
    """A collector of fakes, with these settings of `rollout` and `pipeline`."""
    return Collector(
        engine=engine or FakeEngine(),
        scorer=scorer or FakeScorer(),
        prompts=prompts or CyclicPrompts(),
        rollout_cfg=RolloutConfig.model_validate(rollout),
        pipeline_cfg=PipelineConfig.model_validate(pipeline or {}),
        decode=lambda ids: " ".join(map(str, ids)),
        seed=7,
        render=render,
        comm=comm or SingleProcess(),
        on_scored=on_scored,
    )
