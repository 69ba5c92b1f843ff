"""Episodes that programs play (`env.harness.command`), as samples of a run.

    Runner ── sample without turns ──► HarnessScorer ── start ──► worker: the program
       ▲ open, step, close                 │ opens a session of the door      │
       └──────── Handover ◄── requests ── door ◄──────────────── HTTP ────────┘
    Runner ◄── sample with its paths and its score ── worker ◄── the program has ended

A program runs as a session of a reward worker does; what it asks for are turns of the door. When it
ends, the paths of its door session become the sample and its branches, and the worker is asked for
the score, which the program has printed or reward functions compute.

While the runner is withdrawn, its programs go on until they need a turn. Their requests wait, and
so does the clock of their episodes.
"""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from hone.door.door import Door
from hone.door.handover import Handover, shown_tokens
from hone.door.server import DoorServer
from hone.door.sessions import FinishedSession, History, Session, Terms
from hone.envs.session import ModelAccess
from hone.rewards.environment import EnvFacts
from hone.rewards.live_programs import LivePrograms
from hone.rewards.program import HAS_ENDED, WAS_CUT
from hone.rewards.scorer import Scorer, ScorerStats
from hone.rollout.requests import request_seed
from hone.rollout.runner import Runner
from hone.types import (
    NOT_SAMPLED,
    Branch,
    FailureKind,
    Prompt,
    Sample,
    SamplingParams,
    StopReason,
)

__all__ = ["HarnessScorer", "assemble"]

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Episode:
    """An episode that a program plays, or is to play."""

    sample: Sample
    sampling: SamplingParams
    stage: Literal["playing", "ending", "scoring"] = "playing"
    session: Session | None = None
    """Of the door; None before the program starts."""
    ending: Future[FinishedSession] | None = None
    limit: StopReason | None = None
    """`deadline` where its time was over."""
    is_asked: bool = True
    """Whether the scorer has the sample."""
    is_resting: bool = False
    """Whether the runner of the sample is withdrawn, and has the sample too."""


class HarnessScorer:
    """Plays samples by programs, and scores them by `scorer`. Implements `SampleScorer`, and the
    sessions and requests of its runners."""

    plays_alone = True

    def __init__(
        self,
        make_scorer: Callable[[Callable[[Sample], ModelAccess]], Scorer],
        door: Door,
        server: DoorServer,
        handover: Handover,
        *,
        max_turns: int,
        max_turn_tokens: int | None,
        history: History,
    ) -> None:
        """`make_scorer` makes the scorer with what opens an episode to its program. `max_turns` and
        `max_turn_tokens` bound an episode, and `history` says whether it may be rewritten."""
        self._episodes: dict[str, _Episode] = {}
        """By the id of the sample, from its first submission until it is returned for good."""
        self._door, self._server, self._handover = door, server, handover
        self._history: History = history
        self._max_turns, self._max_turn_tokens = max_turns, max_turn_tokens
        self._returned: list[Sample] = []
        self._counts: Counter[str] = Counter()
        self._ignored: set[str] = set()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        handover.on_call = self._wake_up
        self.scorer = make_scorer(self._open_access)
        assert isinstance(self.scorer.sessions, LivePrograms)
        self._programs = self.scorer.sessions

    # -- SampleScorer ----------------------------------------------------------------------------

    @property
    def max_turns(self) -> int:
        return self.scorer.max_turns

    @property
    def max_turn_tokens(self) -> int | None:
        return self.scorer.max_turn_tokens

    @property
    def environment(self) -> EnvFacts | None:
        return self.scorer.environment

    @property
    def sessions(self) -> HarnessScorer:
        return self

    @property
    def requests(self) -> HarnessScorer:
        return self

    @property
    def pending(self) -> int:
        """Samples that were submitted and not returned since."""
        num_resting = sum(e.is_resting and e.is_asked for e in self._episodes.values())
        num_ending = sum(e.stage == "ending" for e in self._episodes.values())
        return self.scorer.pending - num_resting + num_ending + len(self._returned)

    def begin(self, sample: Sample, sampling: SamplingParams) -> None:
        """Start the program of a sample without turns, or take up again the one that runs already.
        `sampling` is that of its turns, with the longest episode as `max_tokens`."""
        episode = self._episodes.get(sample.id)
        if episode is None:
            self._episodes[sample.id] = _Episode(sample=sample, sampling=sampling)
            self.scorer.begin(sample, sampling)
        else:
            episode.is_resting = False
            if not episode.is_asked:
                self._go_on(episode)

    def submit(self, *samples: Sample) -> None:
        """Never called: `begin` gets all samples, and the runner has no turns of theirs."""
        raise AssertionError(f"{[sample.id for sample in samples]} are played by programs")

    def compare(self, samples: Sequence[Sample]) -> None:
        self.scorer.compare(samples)

    def poll(self, timeout_s: float = 0.0) -> list[Sample]:
        """Samples that are scored or have failed. Waits at most `timeout_s` for one, for a request
        of a program, or for the end of one."""
        was_woken = self._drain()  # a request that has come before is taken after this call
        self._look(0.0)
        if timeout_s > 0.0 and not self._returned and not was_woken:
            self._look(timeout_s)
        returned, self._returned = self._returned, []
        return returned

    def take_decided(self) -> list[Sample]:
        """Like `Scorer.take_decided`, of the samples that programs have left to the scorer."""
        return self.scorer.take_decided()

    def rest(self) -> list[Sample]:
        """Leave programs to themselves until their samples are submitted again. Returns the samples
        whose programs run or wait for a place."""
        returned = self.scorer.rest()
        for sample in returned:
            del self._episodes[sample.id]
        for episode in self._episodes.values():
            if episode.stage == "playing" and not episode.is_resting:
                episode.is_resting = True
                returned.append(episode.sample)
        return returned

    def wake(self) -> None:
        self.scorer.wake()

    def cancel(self) -> None:
        """End all programs but those that rest, and drop their samples."""
        resting = {name: e for name, e in self._episodes.items() if e.is_resting}
        # A worker answers one call at a time, and the scorer forgets those that it has made.
        while any(episode.is_asked for episode in resting.values()):
            self._drain()
            self._look(1.0)
        for episode in self._episodes.values():
            if not episode.is_resting:
                self._close(episode)
        self._episodes = resting
        self._returned.clear()
        self.scorer.cancel()

    def stats(self) -> ScorerStats:
        return replace(
            self.scorer.stats(), num_pending=self.pending, num_requests=dict(self._counts)
        )

    # -- the sessions of a runner ----------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Samples whose programs wait for a place, or for a turn that the engine samples."""
        owners = self._handover.owners
        asking = (
            e
            for e in self._episodes.values()
            if e.stage == "playing" and not e.is_resting and e.session is not None
        )
        num_asking = sum(episode.sample.id in owners for episode in asking)
        return self._programs.num_waiting + num_asking

    def may_restart(self, sample: Sample) -> bool:
        return self._programs.may_restart(sample)

    def restarts(self, sample: Sample) -> bool:
        return self._programs.restarts(sample)

    def is_live(self, sample: Sample) -> bool:
        """Whether the sample has a program, or had one whose end has not been returned."""
        return sample.id in self._episodes

    def end(self, sample: Sample) -> None:
        """End the program of a sample that is dropped."""
        episode = self._episodes.pop(sample.id, None)
        if episode is not None:
            self._close(episode)
            if episode.is_asked:
                self.scorer.forget(sample)
        self._programs.end(sample)

    # -- the requests of a runner ----------------------------------------------------------------

    def take(self, runner: Runner) -> None:
        self._handover.take(runner)

    def give(self, runner: Runner, turns: Sequence[Sample]) -> list[Sample]:
        return self._handover.give(runner, turns, shown_tokens(runner.engine))

    def drop(self, runner: Runner) -> None:
        self._handover.drop(runner)

    # -- an episode ------------------------------------------------------------------------------

    def _open_access(self, sample: Sample) -> ModelAccess:
        """Open the session of the door for a program that is about to start."""
        episode = self._episodes[sample.id]
        assert episode.session is None, f"{sample.id=} has a session already"
        terms = Terms(
            sampling=episode.sampling,
            max_turns=self._max_turns,
            max_turn_tokens=self._max_turn_tokens,
            owner=sample.id,
        )
        # The seed of a sample is equal in its group, and samples must differ.
        seed = request_seed(sample.seed, "harness", 0, sample.prompt.id, sample.index)
        session = self._door.open_session(history=self._history, seed=seed, terms=terms)
        episode.session = session
        return ModelAccess(
            base_url=f"{self._server.url}/sessions/{session.id}",
            api_key=self._door.keys.session_key(session.id),
            name=self._door.model.name,
        )

    def _look(self, timeout_s: float) -> None:
        """Take what has happened, after waiting at most `timeout_s` for something."""
        for sample in self.scorer.poll(timeout_s, wake=self._woken):
            episode = self._episodes.get(sample.id)
            if episode is None:  # it was compared with its group
                self._returned.append(sample)
                continue
            episode.is_asked = False
            if not episode.is_resting:
                self._go_on(episode)
        for episode in [e for e in self._episodes.values() if e.stage == "ending"]:
            assert episode.ending is not None
            if episode.ending.done():
                self._score(episode, episode.ending.result())

    def _go_on(self, episode: _Episode) -> None:
        """Do what follows the scorer's answer on an episode."""
        sample = episode.sample
        observation, sample.observation = sample.observation, None
        if observation is None:  # it is scored, or has failed
            del self._episodes[sample.id]
            self._close(episode)
            sample.must_end = False
            self._returned.append(sample)
        elif observation.state is not None and observation.state[HAS_ENDED]:
            assert episode.session is not None
            episode.stage = "ending"
            episode.limit = StopReason.DEADLINE if observation.state[WAS_CUT] else None
            episode.ending = self._door.end_soon(episode.session.id)
            episode.ending.add_done_callback(lambda _: self._wake_up())
            episode.session = None
        else:
            episode.is_asked = True
            self.scorer.submit(sample)

    def _score(self, episode: _Episode, finished: FinishedSession) -> None:
        """Ask for the score of an episode whose turns are known."""
        sample = episode.sample
        self._counts.update(finished.counts)
        self._warn_of(finished.ignored)
        assemble(sample, finished, self._door.model.decode)
        if finished.rewritten:
            sample.failure = FailureKind.INVALID
            sample.failure_detail = (
                f"env: a request did not extend the turn before it: {finished.rewritten}. "
                "env.history = tree trains such episodes as several rows"
            )
        else:
            self._programs.end_next(sample, episode.limit or finished.limit)
        episode.stage, episode.is_asked, episode.ending = "scoring", True, None
        self.scorer.submit(sample)

    def _close(self, episode: _Episode) -> None:
        """End the session of an episode whose turns are not wanted."""
        if episode.session is not None:
            self._door.end_soon(episode.session.id, "failed")
            episode.session = None

    def _warn_of(self, ignored: frozenset[str]) -> None:
        if new := sorted(ignored - self._ignored):
            self._ignored |= ignored
            _log.warning(
                "warning: requests of env.harness.command ask for their own %s, and get those of "
                "the run: what is trained is sampled from the distribution that the trainer scores",
                ", ".join(new),
            )

    def _drain(self) -> bool:
        """Whether something has called `_wake_up` since the last time."""
        was_woken = False
        with suppress(BlockingIOError):
            while self._woken.recv(1 << 12):
                was_woken = True
        return was_woken

    def _wake_up(self) -> None:
        with suppress(OSError):  # it is full, and so awake, or closed
            self._wake.send(b"\0")

    def close(self) -> None:
        """Kill all programs, and end the server."""
        self.scorer.close()
        self._handover.close()
        self._server.close()
        self._woken.close()
        self._wake.close()


def assemble(
    sample: Sample, finished: FinishedSession, decode: Callable[[Sequence[int]], str]
) -> None:
    """Give a sample the paths of its session: the last one as its own tokens, earlier ones as
    branches. What earlier paths have sampled is context in later ones. A session without turns
    leaves the sample as it is."""
    for number, path in enumerate(finished.paths, start=1):
        prompt, own = _own_part(path)
        if number < len(finished.paths):
            branch = Branch(
                prompt_ids=prompt.token_ids,
                token_ids=own.token_ids,
                logprobs=own.logprobs,
                weight_versions=own.weight_versions,
                loss_mask=own.loss_mask,
                turns=own.turns,
                model_input=prompt.model_input.followed_by(own.model_input, len(prompt.token_ids)),
            )
            sample.branches.append(branch)
            continue
        sample.prompt = replace(
            sample.prompt,
            token_ids=prompt.token_ids,
            text=prompt.text,
            messages=prompt.messages,
            model_input=prompt.model_input,  # what was sent, whatever the row has
        )
        sample.token_ids, sample.logprobs = own.token_ids, own.logprobs
        sample.model_input = own.model_input
        sample.weight_versions, sample.loss_mask = own.weight_versions, own.loss_mask
        sample.turns, sample.stop_reason = own.turns, own.stop_reason
        sample.text = decode(own.token_ids)


def _own_part(path: Sample) -> tuple[Prompt, Sample]:
    """A path in two parts: the context up to the first token that no earlier path has sampled, and
    what follows it."""
    start = path.loss_mask.index(True)
    context = [turn for turn in path.turns if turn.start < start]
    turns = [
        replace(turn, start=turn.start - start, end=turn.end - start)
        for turn in path.turns
        if turn.start >= start
    ]
    before, after = path.model_input.split(start)
    num_asked = len(path.prompt.token_ids)
    prompt = replace(
        path.prompt,
        token_ids=(*path.prompt.token_ids, *path.token_ids[:start]),
        model_input=path.prompt.model_input.followed_by(before, num_asked),
        text=path.prompt.text + "".join(turn.text + turn.observed for turn in context),
    )
    own = replace(
        path,
        token_ids=path.token_ids[start:],
        logprobs=path.logprobs[start:],
        weight_versions=path.weight_versions[start:],
        loss_mask=path.loss_mask[start:],
        turns=turns,
        model_input=after,
    )
    assert all(
        mask or version == NOT_SAMPLED
        for mask, version in zip(own.loss_mask, own.weight_versions, strict=True)
    ), "what follows a token of this path alone is of this path alone"
    return prompt, own
