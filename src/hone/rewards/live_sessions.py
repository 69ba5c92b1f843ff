"""The driver's side of sessions: which are open, which wait for a place, and what each is asked.

A sample without turns starts a session, and each of its turns goes to the same session, until it is
scored or fails. Workers hold the sessions (`fork_server.py`); this class knows their numbers.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from time import monotonic
from typing import Any

from hone.envs.session import Action, DataRow, ModelAccess
from hone.rewards.play import EpisodeSoFar
from hone.rewards.pool import WorkerPool
from hone.rewards.score import Verdict
from hone.rewards.session_player import SessionCall
from hone.rewards.worker import START, STEP
from hone.rollout.settings import EnvConfig
from hone.types import Sample, StopReason, opened_tag

__all__ = ["LiveSession", "LiveSessions"]


@dataclass(slots=True)
class LiveSession:
    """An open session."""

    number: int
    ends_at: float
    """Time of its deadline, by `time.monotonic`."""
    num_answered: int = 0
    """Turns that it has answered."""
    last_reward: float = 0.0
    """Reward of its last observation."""
    is_resting: bool = False
    """Whether its episode is not being played at the moment, so that it takes no place."""


class LiveSessions:
    """The sessions of a scorer's samples, by the sample's id."""

    def __init__(self, pool: WorkerPool, cfg: EnvConfig, *, max_tokens: int) -> None:
        """`max_tokens` is the longest episode."""
        self.num_restarts = 0
        """Episodes that were played again from their start."""
        self._pool = pool
        self._cfg = cfg
        self._max_tokens = max_tokens
        self._live: dict[str, LiveSession] = {}
        self._waiting: deque[tuple[int, Sample]] = deque()
        """Samples whose sessions wait for a place, with their tickets."""
        self._lost: set[str] = set()
        """Samples whose sessions were lost with their last call."""
        self._num_started = 0
        self._resting_since = 0.0

    def __len__(self) -> int:
        return len(self._live)

    @property
    def plays_alone(self) -> bool:
        """Whether sessions ask for turns by themselves."""
        return False

    @property
    def num_waiting(self) -> int:
        """Samples whose sessions wait for a place."""
        return len(self._waiting)

    def submit(self, ticket: int, sample: Sample, given: dict[str, Any]) -> None:
        """Start the session of a sample without turns, once there is a place; else pass it the last
        turn. `given` is for reward functions."""
        self._lost.discard(sample.id)
        if sample.id not in self._live:
            assert not sample.turns, f"{sample.id=} has turns and no session"
            # One that was lost was at the front already.
            add = self._waiting.appendleft if sample.attempt else self._waiting.append
            add((ticket, sample))
            self._start_waiting()
            return
        live = self._live[sample.id]
        call = self._call(sample, live)
        self._pool.submit(ticket, given, call, session=live.number, kind=STEP)

    def take(self, sample: Sample, verdict: Verdict) -> None:
        """Take note of the verdict on a call: all but an observation end the session."""
        if verdict.observation is not None:
            live = self._live[sample.id]
            live.num_answered = len(sample.turns)
            live.last_reward = verdict.observation.reward
            return
        self._live.pop(sample.id, None)
        if verdict.is_session_lost:
            self._lost.add(sample.id)
        self._start_waiting()

    def end(self, sample: Sample) -> None:
        """Close the session of a sample that has failed elsewhere."""
        live = self._live.pop(sample.id, None)
        if live is not None:
            self._pool.close_session(live.number)
            self._start_waiting()

    def is_live(self, sample: Sample) -> bool:
        """Whether the sample has a session."""
        return sample.id in self._live

    def may_restart(self, sample: Sample) -> bool:
        """Whether the episode may be played again if its session is lost."""
        return sample.attempt < self._cfg.retries

    def is_restarting(self, sample: Sample) -> bool:
        """Whether a failed sample has lost its session, and will be played again."""
        return sample.id in self._lost and self.may_restart(sample)

    def restarts(self, sample: Sample) -> bool:
        """As `is_restarting`, once for each lost session; the caller plays it again."""
        restarts = self.is_restarting(sample)
        self._lost.discard(sample.id)
        self.num_restarts += restarts
        return restarts

    def rest(self) -> list[int]:
        """Keep the open sessions without places until `wake`, since their episodes are interrupted.
        Returns the tickets of the samples that wait for a place, and forgets them."""
        self._resting_since = monotonic()
        for live in self._live.values():
            live.is_resting = True
        waiting = [ticket for ticket, _ in self._waiting]
        self._waiting.clear()
        return waiting

    def wake(self) -> None:
        """Go on after `rest`, whose time counts towards no deadline."""
        pause_s = monotonic() - self._resting_since
        for live in self._live.values():
            live.ends_at += pause_s if live.is_resting else 0.0
            live.is_resting = False

    def cancel(self) -> None:
        """Drop the samples that wait, and close all sessions that do not rest."""
        self._waiting.clear()
        for sample_id, live in list(self._live.items()):
            if not live.is_resting:
                del self._live[sample_id]
                self._pool.close_session(live.number)

    def _start_waiting(self) -> None:
        num_played = sum(not live.is_resting for live in self._live.values())
        while self._waiting and num_played < self._cfg.concurrency:
            ticket, sample = self._waiting.popleft()
            self._num_started += 1
            num_played += 1
            live = LiveSession(self._num_started, monotonic() + self._cfg.episode_timeout_s)
            self._live[sample.id] = live
            call = SessionCall(kind="start", row=self._row(sample))
            episode = EpisodeSoFar(given=call, earned=0.0, limit=None)
            self._pool.submit(ticket, {}, episode, session=live.number, kind=START)

    def _access(self, sample: Sample) -> ModelAccess | None:
        """Where the session of a sample asks the policy; None, since the driver asks for turns."""
        return None

    def _row(self, sample: Sample) -> DataRow:
        prompt = sample.prompt
        return DataRow(
            prompt=prompt.text,
            messages=prompt.messages,
            unrendered=prompt.unrendered,
            answer=prompt.answer,
            raw_answer=prompt.raw_answer,
            task=prompt.task,
            columns=dict(prompt.metadata),
            seed=sample.seed,
            max_turns=self._cfg.max_turns,
            max_tokens=self._max_tokens,
            model=self._access(sample),
        )

    def _call(self, sample: Sample, live: LiveSession) -> EpisodeSoFar:
        """The call for the last turn of a sample. A turn that the session has answered already,
        with more than there is room for, ends the episode."""
        is_overdue = monotonic() > live.ends_at
        limit = None
        if is_overdue:
            limit = StopReason.DEADLINE
        elif sample.must_end:
            has_all = len(sample.turns) >= self._cfg.max_turns
            limit = StopReason.MAX_TURNS if has_all else StopReason.LENGTH
        if live.num_answered == len(sample.turns):
            call = SessionCall(kind="finish", reward=live.last_reward, is_overdue=is_overdue)
        else:
            must_end = sample.must_end or is_overdue
            action = self._action(sample, must_end=must_end)
            call = SessionCall(kind="step", action=action, is_overdue=is_overdue)
        earned = math.fsum(turn.reward for turn in sample.turns)
        return EpisodeSoFar(given=call, earned=earned, limit=limit)

    def _action(self, sample: Sample, *, must_end: bool) -> Action:
        *earlier, turn = sample.turns
        before = earlier[-1].observed if earlier else sample.prompt.text
        return Action(
            text=turn.text,
            ended_by=turn.ended_by,
            opened=opened_tag(before),
            token_ids=tuple(sample.token_ids[turn.start : turn.end]),
            content=turn.text,
            stop_reason=str(turn.stop_reason),
            index=len(sample.turns) - 1,
            must_end=must_end,
            tokens_left=max(self._max_tokens - len(sample.token_ids), 0),
        )
