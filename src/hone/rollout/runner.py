"""Runs episodes: the one place where samples go from prompt to score, turn by turn.

    runner = Runner(engine, scorer, episodes)
    runner.submit(groups)
    while runner.groups:
        for group in runner.step().groups:
            ...                                    # all of its samples have a reward or a failure

The runner drives a *group* itself: its finished turns go to the scorer, in whose workers an
environment may answer them. The caller drives an *opened episode*: `step` returns its finished
turns, and the caller answers them with `extend` or `close`. Both use the same requests, tokens and
seeds, so the same texts give the same sample.

    submit, open ──► engine ──► ended turn ──► scorer, or the caller
                       ▲                          │ observation, extend        │ reward, close
                       └── next turn ◄────────────┘                            ▼ scored sample

Training (`Buffer`), evaluation and batch inference each have a runner, and decide which groups
start. Only one thread at a time may use a runner.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from time import perf_counter
from typing import NamedTuple, Protocol, Self

from hone.rewards.environment import EnvFacts
from hone.rewards.scorer import ScorerStats
from hone.rollout.episodes import Episodes
from hone.types import (
    Completion,
    FailureKind,
    Group,
    Message,
    Observation,
    Prompt,
    Request,
    Reward,
    Sample,
    SamplingEngine,
    SamplingParams,
    StopReason,
)

__all__ = [
    "SCORE_WAIT_S",
    "Ended",
    "RequestSource",
    "Runner",
    "RunningGroup",
    "SampleScorer",
    "Sessions",
]

SCORE_WAIT_S = 0.05
"""Longest wait for a score while the engine has no requests."""


class SampleScorer(Protocol):
    """The part of `hone.rewards.scorer.Scorer` that a rollout needs."""

    def begin(self, sample: Sample, sampling: SamplingParams) -> None: ...
    def submit(self, *samples: Sample) -> None: ...
    def compare(self, samples: Sequence[Sample], /) -> None: ...
    def poll(self, timeout_s: float = 0.0) -> list[Sample]: ...
    def take_decided(self) -> list[Sample]:
        """Pending samples that have got no further turn, since the last call, and miss a score."""
        ...

    def cancel(self) -> None: ...
    def rest(self) -> list[Sample]: ...
    def wake(self) -> None: ...
    @property
    def pending(self) -> int: ...
    @property
    def max_turns(self) -> int: ...
    @property
    def max_turn_tokens(self) -> int | None: ...
    @property
    def sessions(self) -> Sessions | None: ...
    @property
    def requests(self) -> RequestSource | None: ...
    @property
    def environment(self) -> EnvFacts | None: ...
    def stats(self) -> ScorerStats: ...


class RequestSource(Protocol):
    """Requests of programs that play the episodes of a runner's samples: `hone.door.harness`."""

    def take(self, runner: Runner, /) -> None:
        """Open an episode for each new request of the runner's samples."""
        ...

    def give(self, runner: Runner, turns: list[Sample], /) -> list[Sample]:
        """Answer requests with their turns, which are closed. Returns the turns of others."""
        ...

    def drop(self, runner: Runner, /) -> None:
        """Close the episodes of all requests that the runner has, and refuse these."""
        ...


class Sessions(Protocol):
    """The part of `hone.rewards.live_sessions.LiveSessions` that a rollout needs."""

    @property
    def plays_alone(self) -> bool:
        """Whether sessions ask for turns by themselves, so that their samples have no requests."""
        ...

    @property
    def num_waiting(self) -> int: ...
    def may_restart(self, sample: Sample) -> bool: ...
    def restarts(self, sample: Sample) -> bool: ...
    def end(self, sample: Sample) -> None: ...
    def is_live(self, sample: Sample) -> bool: ...


@dataclass(slots=True, kw_only=True)
class RunningGroup:
    """A group whose samples are being generated or scored."""

    group: Group
    """The group with the samples that have ended, sorted by `index` once it is complete."""
    sampling: SamplingParams
    """Sampling parameters of the first turns; `max_tokens` bounds a whole episode."""
    order: int
    """Next turns are submitted in this order, and within a group by the index of the sample."""
    number: int
    """Distinguishes repeated draws of one prompt in a run; part of the seeds."""
    requests: dict[int, Request]
    """Requests that the engine has not finished, by index of the sample; after an abort they have
    the tokens so far."""
    episodes: dict[int, Sample] = field(default_factory=dict[int, Sample])
    """Samples by index: those of `requests` with their earlier turns, and finished ones that wait
    for the rest of the group (`Sample.awaits_group`) or for the caller of an opened episode."""
    unscored: int = 0
    """Samples that the scorer, or the caller of an opened episode, has."""
    undecided: int = 0
    """Samples among `unscored` that may get another turn."""
    is_compared: bool = False
    """Whether all samples have ended, and functions of whole groups score those that waited."""
    is_opened: bool = False
    """Whether it is an opened episode, driven by the caller."""

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        sampling: SamplingParams,
        episodes: Episodes,
        *,
        group_id: str,
        indices: Iterable[int],
        order: int,
        number: int = 0,
        is_opened: bool = False,
    ) -> Self:
        """A new group with a request for the first turn of each sample in `indices`."""
        return cls(
            group=Group(id=group_id, prompt=prompt, samples=[]),
            sampling=sampling,
            order=order,
            number=number,
            requests={
                i: episodes.first_request(f"{group_id}/{i}", prompt, sampling, number=number)
                for i in indices
            },
            is_opened=is_opened,
        )

    @property
    def generated(self) -> bool:
        return not self.requests and not self.undecided

    @property
    def complete(self) -> bool:
        return not self.requests and not self.unscored

    @property
    def num_finished(self) -> int:
        """Samples that the engine has finished, scored or not."""
        num_waiting = len(self.episodes.keys() - self.requests.keys()) if self.episodes else 0
        return len(self.group.samples) + num_waiting + self.unscored - self.undecided

    def prioritise(self) -> None:
        """Let the engine admit its requests before those of new groups."""
        self.requests = {i: replace(r, priority=-1) for i, r in self.requests.items()}


class Ended(NamedTuple):
    """The groups and turns that a step has finished."""

    groups: list[RunningGroup]
    """Groups all of whose samples are scored."""
    turns: list[Sample]
    """Opened episodes whose turn has ended; the caller answers with `extend` or `close`."""


@dataclass(slots=True)
class Runner:
    """Drives an engine and a scorer over groups and opened episodes.

    While it has requests, nothing else may use the engine and the scorer. Without a scorer a sample
    ends with its first turn and has no reward.
    """

    engine: SamplingEngine
    scorer: SampleScorer | None
    episodes: Episodes
    groups: dict[str, RunningGroup] = field(default_factory=dict[str, RunningGroup])
    """Groups and opened episodes that have not ended, by group id."""
    is_submitted: bool = True
    """False between `withdraw` and `resume`, while the engine has no requests."""
    num_ended: int = 0
    """Samples of groups that have ended."""
    num_failed: int = 0
    """Samples among these that have failed."""
    num_undecided: int = 0
    """Samples with the scorer that may get another turn."""
    num_steps: int = 0
    """Steps of the engine that `step` has made."""
    num_prompt_tokens: int = 0
    """Prompt tokens of all turns that have ended."""
    num_cached_tokens: int = 0
    """Tokens among these that the engine has read from its prefix cache."""
    _num_requests: int = 0
    """Requests of the engine, and those of the next step."""
    _next_turns: list[Request] = field(default_factory=list[Request])
    """Requests to be submitted by the next step."""
    _ended: Ended = field(default_factory=lambda: Ended([], []))
    """Returned by the next `step` or `poll`."""
    _decided: set[str] = field(default_factory=set[str])
    """Ids of samples that were undecided and that only miss a score."""
    _dropped: set[str] = field(default_factory=set[str])
    """Ids of requests of closed episodes that had just finished when they were aborted."""
    _num_opened: int = 0
    _sent_at: dict[str, float] = field(default_factory=dict[str, float])
    """When each request that the engine has was submitted, by its id and `time.perf_counter`."""

    @property
    def sessions(self) -> Sessions | None:
        """The live objects of the groups' episodes, where the environment has them."""
        return None if self.scorer is None else self.scorer.sessions

    @property
    def _requests(self) -> RequestSource | None:
        """The requests of programs that play the groups' episodes."""
        return None if self.scorer is None else self.scorer.requests

    @property
    def has_requests(self) -> bool:
        """Whether the engine has requests, or gets some with the next step."""
        return self.engine.has_unfinished or bool(self._next_turns)

    @property
    def is_sampling(self) -> bool:
        """Whether the engine has requests, or may get some once the scorer has answered."""
        return self.has_requests or self.num_undecided > 0

    @property
    def num_waiting(self) -> int:
        """Samples with the scorer that wait until a session ends and leaves them its place."""
        return 0 if self.sessions is None else self.sessions.num_waiting

    @property
    def num_unanswered(self) -> int:
        """Samples with the scorer that may get another turn, and do not wait for a session."""
        return self.num_undecided - self.num_waiting

    @property
    def num_unfinished(self) -> int:
        """Samples that need the engine, or may need it for another turn."""
        return self._num_requests + self.num_undecided

    # -- groups, driven from inside --------------------------------------------------------------

    def submit(self, groups: Iterable[RunningGroup]) -> None:
        """Submit the unfinished requests of groups in one call."""
        entries = [entry for entry in groups if not entry.complete]
        for entry in entries:
            self._start_sessions(entry)
        requests = [request for entry in entries for request in entry.requests.values()]
        if requests:
            self._send(requests)  # first: the engine may refuse them
        self.groups.update((entry.group.id, entry) for entry in entries)
        self._num_requests += len(requests)

    def step(self) -> Ended:
        """Make one engine step and take finished scores. Where the engine has no requests, wait at
        most `SCORE_WAIT_S` for a score."""
        if self._next_turns:
            # Sorted, so that their order does not depend on the speed of the environment.
            self._send(sorted(self._next_turns, key=self._place))
            self._next_turns.clear()
        elif not self.engine.has_unfinished:
            return self.poll(SCORE_WAIT_S)
        self.num_steps += 1
        for completion in self.engine.step():
            self._on_completion(completion)
        return self.poll()

    def poll(self, timeout_s: float = 0.0) -> Ended:
        """Wait at most `timeout_s` for a score, without an engine step."""
        for sample in [] if self.scorer is None else self.scorer.poll(timeout_s):
            entry = self.groups[sample.id.rpartition("/")[0]]
            self._returned(entry, sample)
            if sample.observation is None:
                if self.sessions is not None and self.sessions.restarts(sample):
                    self._start(entry, self._begin(entry, sample.index, sample.attempt + 1))
                else:
                    self._end(entry, sample)
            elif not self._go_on(entry, sample):
                self._score(entry, sample)
        for sample in [] if self.scorer is None else self.scorer.take_decided():
            self._note_decided(self.groups[sample.id.rpartition("/")[0]], sample)
        if (requests := self._requests) is not None:
            self._ended.turns[:] = requests.give(self, self._ended.turns)
            requests.take(self)
        ended = self._ended
        if ended.groups or ended.turns:
            self._ended = Ended([], [])
            return ended
        return _NOTHING

    def withdraw(self) -> None:
        """Abort all requests of the engine. Samples keep their tokens so far until `resume`; `poll`
        still returns scores."""
        self._abort()
        for sample in [] if self.scorer is None else self.scorer.rest():
            entry = self.groups[sample.id.rpartition("/")[0]]
            self._returned(entry, sample)
            self._start(entry, sample)

    def drop(self) -> None:
        """Abort all requests and drop all samples, whose sessions are closed. Those of another
        runner that rest stay open. Opened episodes must have been closed."""
        self._abort()
        if (requests := self._requests) is not None:
            requests.drop(self)
        assert not any(entry.is_opened for entry in self.groups.values())
        if self.scorer is not None:
            self.scorer.cancel()
        self.groups.clear()
        self._decided.clear()
        self.num_undecided = 0

    def _abort(self) -> None:
        """Abort all requests of the engine, whose samples keep their tokens."""
        waiting = {request.id for request in self._next_turns}
        requests = (
            request for entry in self.groups.values() for request in entry.requests.values()
        )
        running = [*(r.id for r in requests if r.id not in waiting), *self._dropped]
        self._next_turns.clear()
        self.is_submitted = False
        for completion in self.engine.abort(running) if running else []:
            self._on_completion(completion)
        while self.engine.has_unfinished:  # requests that had just finished
            for completion in self.engine.step():
                self._on_completion(completion)
            # The requests of an engine that was lost meanwhile are queued for another, which may
            # never come.
            for completion in self.engine.abort(running):
                self._on_completion(completion)
        self._num_requests = 0

    def _first_request(
        self, entry: RunningGroup, index: int, prompt: Prompt | None = None
    ) -> Request:
        """The request for the first turn of a sample, after `prompt`, by default the group's."""
        return self.episodes.first_request(
            f"{entry.group.id}/{index}",
            entry.group.prompt if prompt is None else prompt,
            entry.sampling,
            number=entry.number,
        )

    def resume(self, groups: Iterable[RunningGroup]) -> None:
        """Continue after `withdraw` with these groups and with all opened episodes. Other groups
        are dropped: another process may continue with them."""
        groups = [*groups]
        opened = [entry for entry in self.groups.values() if entry.is_opened]
        if self.sessions is not None:
            kept = {entry.group.id for entry in (*groups, *opened)}
            dropped = (x for group_id, x in self.groups.items() if group_id not in kept)
            for sample in (sample for entry in dropped for sample in entry.episodes.values()):
                self.sessions.end(sample)
        self.groups.clear()
        self.is_submitted = True
        if self.scorer is not None:
            self.scorer.wake()
        self.submit([*groups, *opened])

    # -- episodes, driven from outside -----------------------------------------------------------

    def open(
        self, prompt: Prompt, sampling: SamplingParams, *, number: int | None = None, index: int = 0
    ) -> str:
        """Start an episode with the first turn after `prompt`, and return the episode's id.

        It has the seed of sample `index` in group `number` of this prompt; by default each episode
        gets another number. Raises the engine's ValueError where that refuses the request; then no
        episode is open.
        """
        order, self._num_opened = self._num_opened, self._num_opened + 1
        # Unlike the order unique in the process: several runners may have requests of one source.
        name = f"open-{next(_OPENED)}"
        entry = RunningGroup.of(
            prompt,
            sampling,
            self.episodes,
            group_id=name,
            indices=[index],
            order=order,
            number=order if number is None else number,
            is_opened=True,
        )
        if self.is_submitted:
            self.submit([entry])
        else:
            self.groups[entry.group.id] = entry
        return entry.requests[index].id

    def extend(self, episode_id: str, answer: Observation | str | Sequence[Message]) -> bool:
        """Append the answer to the last turn, like an environment's answer, and request the next
        turn. False where no turn or no token is left, or where the answer cannot be rendered, which
        fails the sample. Then the episode can only be closed.

        Raises ValueError where there is no such episode, or its turn has not ended.
        """
        entry, index = self._opened(episode_id)
        if entry.requests:
            raise ValueError(f"the last turn of episode {episode_id!r} is still being sampled")
        sample = entry.episodes[index]
        if not sample.must_end:
            is_observation = isinstance(answer, Observation)
            sample.observation = answer if is_observation else Observation(answer)
            if self._go_on(entry, sample):
                entry.unscored = entry.undecided = 0
                return True
        if sample.failure is None:
            has_all_turns = len(sample.turns) >= self.episodes.max_turns
            sample.stop_reason = StopReason.MAX_TURNS if has_all_turns else StopReason.LENGTH
        return False

    def close(
        self,
        episode_id: str,
        reward: Reward | float | None = None,
        *,
        failure: FailureKind | None = None,
        detail: str = "",
    ) -> Sample:
        """End an episode and return its sample with `reward` or `failure`. A sample that has failed
        keeps its failure, and a reward that is not finite fails it.

        A turn that is still being sampled is aborted, and its tokens are not in the sample. Raises
        ValueError where there is no such episode.
        """
        entry, index = self._opened(episode_id)
        del self.groups[entry.group.id]
        turns = [turn for turn in self._ended.turns if turn.id != episode_id]  # of `withdraw`
        self._ended = self._ended._replace(turns=turns)
        self._sent_at.pop(episode_id, None)
        sample = entry.episodes.get(index) or self.episodes.begin(
            entry.group.prompt, episode_id, number=entry.number
        )
        if entry.requests and self.is_submitted:
            self._num_requests -= 1
            if any(request.id == episode_id for request in self._next_turns):
                self._next_turns = [r for r in self._next_turns if r.id != episode_id]
            elif not self.engine.abort([episode_id]):
                self._dropped.add(episode_id)
        if isinstance(reward, float | int):
            reward = Reward(total=float(reward))
        if failure is None and reward is not None and not math.isfinite(reward.total):
            failure, detail = FailureKind.INVALID, f"the reward is {reward.total}"
        if sample.failure is None:
            sample.failure, sample.failure_detail = failure, detail
        sample.reward = reward if sample.failure is None else None
        return sample

    def _opened(self, episode_id: str) -> tuple[RunningGroup, int]:
        group_id, _, index = episode_id.rpartition("/")
        entry = self.groups.get(group_id)
        if entry is None or not entry.is_opened:
            raise ValueError(f"no episode {episode_id!r} is open")
        return entry, int(index)

    # -- of one sample ---------------------------------------------------------------------------

    def _start_sessions(self, entry: RunningGroup) -> None:
        """Start the sessions of a group's unfinished samples that have none, since they have not
        begun or another process began them. Their requests for the first turns are made when their
        sessions have said what goes before."""
        if self.sessions is None or entry.is_opened:
            return
        for index in sorted(entry.requests):
            sample = entry.episodes.get(index)
            if sample is None or not self.sessions.is_live(sample):
                attempt = 0 if sample is None else sample.attempt
                self._start(entry, self._begin(entry, index, attempt))
            elif self.sessions.plays_alone:
                self._start(entry, sample)

    def _begin(self, entry: RunningGroup, index: int, attempt: int) -> Sample:
        sample_id = f"{entry.group.id}/{index}"
        sample = self.episodes.begin(entry.group.prompt, sample_id, number=entry.number)
        sample.attempt = attempt
        return sample

    def _start(self, entry: RunningGroup, sample: Sample) -> None:
        """Start the session of a sample without turns, or leave that to `resume` while nothing is
        submitted."""
        assert self.scorer is not None
        if not self.is_submitted:
            entry.requests[sample.index] = self._first_request(entry, sample.index)
            entry.episodes[sample.index] = sample
            return
        entry.requests.pop(sample.index, None)
        entry.episodes.pop(sample.index, None)
        entry.unscored += 1
        entry.undecided += 1
        self.num_undecided += 1
        self.scorer.begin(sample, entry.sampling)

    def _returned(self, entry: RunningGroup, sample: Sample) -> None:
        """Take note that the scorer has a sample no longer."""
        entry.unscored -= 1
        if sample.id in self._decided:
            self._decided.remove(sample.id)
        elif not entry.is_compared and self._may_go_on(sample):
            entry.undecided -= 1
            self.num_undecided -= 1

    def _note_decided(self, entry: RunningGroup, sample: Sample) -> None:
        """Take note that a sample that the scorer still has needs the engine no more."""
        if self._may_go_on(sample):
            self._decided.add(sample.id)
            entry.undecided -= 1
            self.num_undecided -= 1

    def _may_go_on(self, sample: Sample) -> bool:
        """Whether a sample that the scorer has may need the engine again."""
        return not sample.must_end or (
            self.sessions is not None and self.sessions.may_restart(sample)
        )

    def _send(self, requests: Sequence[Request]) -> None:
        self.engine.submit(requests)
        now = perf_counter()
        self._sent_at.update((request.id, now) for request in requests)

    def _on_completion(self, completion: Completion) -> None:
        """Take a completion, finished or aborted, from the engine."""
        sent_at = self._sent_at.pop(completion.request_id, None)
        group_id, _, place = completion.request_id.rpartition("/")
        entry = self.groups.get(group_id)
        if entry is None:
            self._dropped.remove(completion.request_id)
            return
        index = int(place)
        request = entry.requests[index]
        if completion.stop_reason is StopReason.ABORT:
            resumed = completion if completion.token_ids else None
            entry.requests[index] = replace(request, resumed=resumed)
            return
        del entry.requests[index]
        self._num_requests -= 1
        self.num_prompt_tokens += len(request.prompt_ids)
        self.num_cached_tokens += completion.num_cached_tokens
        sample = entry.episodes.pop(index, None) or self.episodes.begin(
            entry.group.prompt, completion.request_id, number=entry.number
        )
        self.episodes.take(sample, completion, max_tokens=entry.sampling.max_tokens)
        if sent_at is not None:
            sample.turns[-1].policy_s = perf_counter() - sent_at
        if entry.is_opened:
            entry.episodes[index] = sample
            entry.unscored, entry.undecided = 1, int(not sample.must_end)
            self._ended.turns.append(sample)
        else:
            self._score(entry, sample)

    def _score(self, entry: RunningGroup, sample: Sample) -> None:
        if self.scorer is None:
            self._end(entry, sample)
            return
        may_go_on = self._may_go_on(sample)
        entry.unscored += 1
        entry.undecided += may_go_on
        self.num_undecided += may_go_on
        self.scorer.submit(sample)

    def _go_on(self, entry: RunningGroup, sample: Sample) -> bool:
        """Request the turn after an observation; False where there can be none."""
        first = self._first_request(entry, sample.index, sample.prompt)
        limit = entry.sampling.max_tokens
        request = self.episodes.next_request(sample, first, max_tokens=limit)
        if request is None:
            return False
        entry.episodes[sample.index] = sample
        entry.requests[sample.index] = request
        if self.is_submitted:
            self._next_turns.append(request)
            self._num_requests += 1
        return True

    def _end(self, entry: RunningGroup, sample: Sample) -> None:
        if sample.awaits_group:
            entry.episodes[sample.index] = sample
        else:
            self.num_ended += 1
            self.num_failed += sample.failure is not None
            entry.group.samples.append(sample)
        if not entry.complete:
            return
        if entry.episodes:
            assert self.scorer is not None
            waiting = [entry.episodes.pop(index) for index in sorted(entry.episodes)]
            entry.unscored, entry.is_compared = len(waiting), True
            self.scorer.compare(waiting)
        else:
            del self.groups[entry.group.id]
            entry.group.samples.sort(key=lambda ended: ended.index)
            self._ended.groups.append(entry)

    def _place(self, request: Request) -> tuple[int, int]:
        group_id, _, index = request.id.rpartition("/")
        return self.groups[group_id].order, int(index)


_OPENED = count()
_NOTHING = Ended([], [])
"""Shared by all steps that finish nothing, and never changed."""
