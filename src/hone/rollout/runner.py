"""Plays episodes: the one place where samples go from prompt to score, turn by turn.

    runner = Runner(engine, scorer, episodes)
    runner.submit(groups)
    while runner.groups:
        for group in runner.step().groups:
            ...                                    # all of its samples have a reward or a failure

A *group* is driven from inside: its ended turns go to the scorer, in whose workers an environment
may answer them. An *opened episode* is driven from outside: its ended turns come out of `step`, and
the caller answers them with `extend` or `close`. Both go through the same requests, tokens and
seeds, so that the same texts give the same sample.

    submit, open ──► engine ──► ended turn ──► scorer, or the caller
                       ▲                          │ observation, extend        │ reward, close
                       └── next turn ◄────────────┘                            ▼ scored sample

Training (`Buffer`), evaluation and batch inference own a runner each, and say which groups start.
A runner belongs to one thread at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, Self

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

__all__ = ["SCORE_WAIT_S", "Ended", "Runner", "RunningGroup", "SampleScorer"]

SCORE_WAIT_S = 0.05
"""Longest wait for a score at a time, where the engine has nothing to do."""


class SampleScorer(Protocol):
    """The part of `hone.rewards.scorer.Scorer` that a rollout needs."""

    def submit(self, *samples: Sample) -> None: ...
    def poll(self, timeout_s: float = 0.0) -> list[Sample]: ...
    def cancel(self) -> None: ...
    @property
    def pending(self) -> int: ...
    @property
    def max_turns(self) -> int: ...
    @property
    def takes_whole_groups(self) -> bool: ...
    def stats(self) -> ScorerStats: ...


@dataclass(slots=True, kw_only=True)
class RunningGroup:
    """A group on the way from its prompt to its scored samples."""

    group: Group
    """Its samples are those that have ended, in the order of `index` once it is complete."""
    sampling: SamplingParams
    """Shared by the first turns; `max_tokens` bounds a whole episode."""
    order: int
    """The engine gets next turns in this order, and within a group in that of their indices."""
    number: int
    """Distinguishes the times that one prompt is sampled in a run; part of the seeds."""
    requests: dict[int, Request]
    """Requests that the engine has not finished, by index of the sample; after an abort they hold
    the tokens so far."""
    episodes: dict[int, Sample] = field(default_factory=dict[int, Sample])
    """The earlier turns of `requests`, by index; and samples that have ended and wait, for all of
    the group where reward functions compare them, or for the caller that drives them."""
    unscored: int = 0
    """Samples that are with the scorer, or with the caller that drives them."""
    undecided: int = 0
    """Samples among `unscored` that may come back for another turn."""
    is_opened: bool = False
    """It is one episode, driven from outside."""

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
        """A group whose first turns are to be sampled, one for each of the indices of samples."""
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
        """Let the engine admit it before groups that have no tokens yet."""
        self.requests = {i: replace(r, priority=-1) for i, r in self.requests.items()}


class Ended(NamedTuple):
    """What a step has brought to an end."""

    groups: list[RunningGroup]
    """Groups of which all samples are scored."""
    turns: list[Sample]
    """Opened episodes whose turn has ended: the caller answers with `extend` or `close`."""


@dataclass(slots=True)
class Runner:
    """Drives an engine and a scorer over groups and opened episodes.

    While it has requests, all requests of the engine and all samples of the scorer are its own.
    Without a scorer a sample ends with its first turn, and has no reward.
    """

    engine: SamplingEngine
    scorer: SampleScorer | None
    episodes: Episodes
    groups: dict[str, RunningGroup] = field(default_factory=dict[str, RunningGroup])
    """Groups and opened episodes that have not ended, by id."""
    is_submitted: bool = True
    """False between `withdraw` and `resume`, while the engine has no requests."""
    num_ended: int = 0
    """Samples of groups that have ended."""
    num_failed: int = 0
    """Samples among these without a reward since they have failed."""
    num_undecided: int = 0
    """Samples with the scorer that may come back for another turn."""
    num_steps: int = 0
    """Steps of the engine that `step` has made."""
    num_prompt_tokens: int = 0
    """Prompt tokens of all turns that have ended."""
    num_cached_tokens: int = 0
    """Tokens among these that the engine has read from its prefix cache."""
    _num_requests: int = 0
    """Requests that the engine has, or gets with the next step."""
    _next_turns: list[Request] = field(default_factory=list[Request])
    """Requests to be submitted by the next step."""
    _ended: Ended = field(default_factory=lambda: Ended([], []))
    """Returned by the next `step` or `poll`."""
    _dropped: set[str] = field(default_factory=set[str])
    """Requests of closed episodes that had just finished when they were aborted."""
    _num_opened: int = 0

    @property
    def has_requests(self) -> bool:
        """Whether there is work for the engine."""
        return self.engine.has_unfinished or bool(self._next_turns)

    @property
    def is_sampling(self) -> bool:
        """Whether there is work for the engine, or may be once the scorer has answered."""
        return self.has_requests or self.num_undecided > 0

    @property
    def num_unfinished(self) -> int:
        """Samples that may need the engine again, as far as is known."""
        return self._num_requests + self.num_undecided

    # -- groups, driven from inside --------------------------------------------------------------

    def submit(self, groups: Iterable[RunningGroup]) -> None:
        """Submit the unfinished requests of groups, together."""
        requests: list[Request] = []
        for entry in groups:
            if not entry.complete:
                self.groups[entry.group.id] = entry
                requests += entry.requests.values()
        self._num_requests += len(requests)
        if requests:
            self.engine.submit(requests)

    def step(self) -> Ended:
        """Make one step of the engine and take what the scorer has; where the engine has nothing to
        do, wait at most `SCORE_WAIT_S` for a score."""
        if self._next_turns:
            # However fast each was answered, the engine gets them in the same order.
            self.engine.submit(sorted(self._next_turns, key=self._place))
            self._next_turns.clear()
        elif not self.engine.has_unfinished:
            return self.poll(SCORE_WAIT_S)
        self.num_steps += 1
        for completion in self.engine.step():
            self._on_completion(completion)
        return self.poll()

    def poll(self, timeout_s: float = 0.0) -> Ended:
        """Wait at most `timeout_s` for a score, without a step of the engine."""
        for sample in [] if self.scorer is None else self.scorer.poll(timeout_s):
            entry = self.groups[sample.id.rpartition("/")[0]]
            entry.unscored -= 1
            entry.undecided -= not sample.must_end
            self.num_undecided -= not sample.must_end
            if sample.observation is None:
                self._end(entry, sample)
            elif not self._go_on(entry, sample):
                self._score(entry, sample)
        ended = self._ended
        if ended.groups or ended.turns:
            self._ended = Ended([], [])
            return ended
        return _NOTHING

    def withdraw(self) -> None:
        """Abort all requests of the engine. Their samples keep the tokens so far, and go on with
        `resume`; scores still come out of `poll`."""
        waiting = {request.id for request in self._next_turns}
        requests = (
            request for entry in self.groups.values() for request in entry.requests.values()
        )
        running = [*(one.id for one in requests if one.id not in waiting), *self._dropped]
        self._next_turns.clear()
        self.is_submitted = False
        for completion in self.engine.abort(running) if running else []:
            self._on_completion(completion)
        while self.engine.has_unfinished:  # requests that had just finished
            for completion in self.engine.step():
                self._on_completion(completion)
            # Requests of an engine that was lost meanwhile wait for another, which may never come.
            for completion in self.engine.abort(running):
                self._on_completion(completion)
        self._num_requests = 0

    def resume(self, groups: Iterable[RunningGroup]) -> None:
        """Go on after `withdraw` with these groups and with all opened episodes. What else it had
        is no longer its own: another process may go on with it."""
        opened = [entry for entry in self.groups.values() if entry.is_opened]
        self.groups.clear()
        self.is_submitted = True
        self.submit([*groups, *opened])

    # -- episodes, driven from outside -----------------------------------------------------------

    def open(
        self, prompt: Prompt, sampling: SamplingParams, *, number: int | None = None, index: int = 0
    ) -> str:
        """Begin an episode with the turn that answers `prompt`; its id.

        It has the seed of sample `index` of a group `number` of this prompt. Unset, each episode
        has a number of its own.
        """
        order, self._num_opened = self._num_opened, self._num_opened + 1
        entry = RunningGroup.of(
            prompt,
            sampling,
            self.episodes,
            group_id=f"open-{order}",
            indices=[index],
            order=order,
            number=order if number is None else number,
            is_opened=True,
        )
        self.groups[entry.group.id] = entry
        if self.is_submitted:
            self.submit([entry])
        return entry.requests[index].id

    def extend(self, episode_id: str, answer: Observation | str | Sequence[Message]) -> bool:
        """Append what answers the last turn, as an environment's answer is, and ask for the next
        turn. False where none is left: of turns, of tokens, or since the answer cannot be rendered,
        which fails the sample. Then the episode can only be closed.

        Raises ValueError where there is no such episode, or its turn has not ended.
        """
        entry, index = self._opened(episode_id)
        if entry.requests:
            raise ValueError(f"the last turn of episode {episode_id!r} is still sampled")
        sample = entry.episodes[index]
        if not sample.must_end:
            is_whole = isinstance(answer, Observation)
            sample.observation = answer if is_whole else Observation(answer)
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
        """End an episode; its sample has `reward`, or `failure`. One that has failed keeps its
        failure, and a reward that is no finite number fails it.

        A turn that is still sampled is aborted, and its tokens are no part of the sample. Raises
        ValueError where there is no such episode.
        """
        entry, index = self._opened(episode_id)
        del self.groups[entry.group.id]
        sample = entry.episodes.get(index) or self.episodes.begin(
            entry.group.prompt, episode_id, number=entry.number
        )
        if entry.requests and self.is_submitted:
            self._num_requests -= 1
            if any(request.id == episode_id for request in self._next_turns):
                self._next_turns = [one for one in self._next_turns if one.id != episode_id]
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

    def _on_completion(self, completion: Completion) -> None:
        """Take a completion, finished or aborted, from the engine."""
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
        entry.episodes[sample.index] = sample
        if self.scorer.takes_whole_groups and entry.requests:
            return
        waiting = sorted(entry.episodes.keys() - entry.requests.keys())
        samples = [entry.episodes.pop(index) for index in waiting]
        num_undecided = sum(not one.must_end for one in samples)
        entry.unscored += len(samples)
        entry.undecided += num_undecided
        self.num_undecided += num_undecided
        self.scorer.submit(*samples)

    def _go_on(self, entry: RunningGroup, sample: Sample) -> bool:
        """Ask for the turn after an observation; False where there can be none."""
        first = self.episodes.first_request(
            sample.id, sample.prompt, entry.sampling, number=entry.number
        )
        request = self.episodes.next_request(sample, first)
        if request is None:
            return False
        entry.episodes[sample.index] = sample
        entry.requests[sample.index] = request
        if self.is_submitted:
            self._next_turns.append(request)
            self._num_requests += 1
        return True

    def _end(self, entry: RunningGroup, sample: Sample) -> None:
        self.num_ended += 1
        self.num_failed += sample.failure is not None
        entry.group.samples.append(sample)
        if entry.complete:
            del self.groups[entry.group.id]
            entry.group.samples.sort(key=lambda one: one.index)
            self._ended.groups.append(entry)

    def _place(self, request: Request) -> tuple[int, int]:
        group_id, _, index = request.id.rpartition("/")
        return self.groups[group_id].order, int(index)


_NOTHING = Ended([], [])
"""Shared by all steps that end nothing; nobody appends to it."""
