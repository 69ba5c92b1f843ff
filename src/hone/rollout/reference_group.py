"""Several frozen references on devices of their own, used as one.

A step's rows come cut into passes. Each goes to the reference that has the fewest tokens before it,
the dearest passes first, so that all end at about the same time; a reference has two at most, one
that it computes and one that waits, and no more of a step is ever on its way. One that is lost, or
does not answer, is killed and started anew; its passes are scored from the beginning, by whoever is
there. Which reference scores a pass cannot be seen in its numbers.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from time import monotonic, sleep
from typing import Any, Protocol

import torch
from torch import Tensor

from hone.rollout.handles import EngineHandle, EnginesLostError, RecordEvent
from hone.types import EngineLostError, Trajectory
from hone.weights.protocol import Pending

__all__ = ["LocalReference", "ReferenceGroup"]

_log = logging.getLogger(__name__)

AHEAD = 2
"""Passes that a reference has at a time."""
WAIT_S = 0.02
"""Longest wait for one reference before the others are looked at."""


class _Scorer(Protocol):
    def score(self, rows: Sequence[Trajectory]) -> Any: ...


class LocalReference:
    """A scorer in a thread of this process. One that hangs can only be left to itself."""

    num_ranks = 1

    def __init__(self, name: str, scorer: _Scorer) -> None:
        self.name = name
        self._scorer = scorer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"hone-{name}")

    def call(self, method: str, /, *args: Any) -> Pending:
        """Begin a call of a method of the scorer, after those before it."""
        return self._thread.submit(getattr(self._scorer, method), *args)

    def kill(self) -> None:
        """Begin no further call."""
        self._thread.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True, eq=False)
class _Member:
    """One reference from its start to its end; what is started in its place is another."""

    index: int
    handle: EngineHandle
    starting: Pending | None
    """None once it has answered its first call."""
    given: deque[tuple[int, Pending]] = field(default_factory=deque[tuple[int, Pending]])
    """Passes that it has, by number, in the order in which it computes them."""
    load: int = 0
    """Tokens of these."""
    has_scored: bool = False
    heard_at: float = field(default_factory=monotonic)
    """When it answered last, or was given something to do."""


@dataclass(frozen=True, slots=True)
class _Step:
    """What is to be scored, and what has been."""

    rows: Sequence[Trajectory]
    passes: Sequence[Sequence[int]]
    waiting: deque[int]
    """Numbers of passes that no reference has."""
    values: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Log-probabilities of a pass, those of its rows one after the other."""

    def num_tokens(self, number: int) -> int:
        return sum(self.rows[i].num_tokens for i in self.passes[number])

    def message(self, number: int) -> list[Trajectory]:
        """The rows of a pass, with what decides their log-probabilities and nothing else."""
        rows = [self.rows[i] for i in self.passes[number]]
        return [
            Trajectory(id=r.id, group_id=r.group_id, token_ids=r.token_ids, loss_mask=r.loss_mask)
            for r in rows
        ]

    def logprobs(self) -> list[Tensor]:
        """Of each row; of one that trains nothing there are none."""
        found = [torch.empty(0)] * len(self.rows)
        for number, indices in enumerate(self.passes):
            lengths = [self.rows[i].num_trained for i in indices]
            for i, values in zip(indices, self.values[number].split(lengths), strict=True):
                found[i] = values.clone()
        return found


class ReferenceGroup:
    """Log-probabilities under the reference model, from several that have one each.

    `handles` reach `hone.trainer.scorer.FrozenScorer`s. One that does not answer for
    `timeout_s` while it has work is taken for lost, killed, and replaced by `restart(index)`, which
    need not wait for it. For its start and its first pass, which may compile, it has
    `start_timeout_s` (unset: `timeout_s`). After `max_restarts` of these, in all, EnginesLostError
    names the reference and what it died of.
    """

    def __init__(
        self,
        handles: Sequence[EngineHandle],
        *,
        restart: Callable[[int], EngineHandle],
        timeout_s: float,
        max_restarts: int,
        start_timeout_s: float | None = None,
    ) -> None:
        self._restart = restart
        self._timeout_s = timeout_s
        self._start_timeout_s = timeout_s if start_timeout_s is None else start_timeout_s
        self._max_restarts = max_restarts
        self._num_restarts = 0
        self._event: RecordEvent | None = None
        self._members = [_new(index, handle) for index, handle in enumerate(handles)]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hone-references")
        self._is_closed = Event()

    def begin(
        self, rows: Sequence[Trajectory], passes: Sequence[Sequence[int]]
    ) -> Future[list[Tensor]]:
        """Score the trained tokens of `rows` in `passes`, lists of row indices, in the background.

        The future is of [N_i] float32 on the CPU for each row; one in no pass has no values. It
        raises EnginesLostError, and what a reference has raised that is no failure of its own.
        """
        return self._thread.submit(self._score, _Step(rows, passes, deque(range(len(passes)))))

    def report_to(self, event: RecordEvent) -> None:
        """From now on call `event("reference_lost", name=..., restart=..., cause=...)` for each
        loss, in the thread that scores; `restart` is the number of the one that follows, None where
        none is left."""
        self._event = event

    def close(self) -> None:
        """End all references, and what they are at."""
        self._is_closed.set()
        self._thread.shutdown(cancel_futures=True)  # so that nobody is started anew after this
        for member in self._members:
            member.handle.kill()

    # -- in the thread ---------------------------------------------------------------------------

    def _score(self, step: _Step) -> list[Tensor]:
        for member in self._members:  # nobody has asked them since the last step
            member.heard_at = monotonic()
        while len(step.values) < len(step.passes):
            if self._is_closed.is_set():
                raise CancelledError("references were closed")
            for index in range(len(self._members)):
                self._look_at_start(self._members[index], step)
            self._deal(step)
            busy = [member for member in self._members if member.given]
            if not busy:
                sleep(WAIT_S)
            deadline = monotonic() + WAIT_S
            for member in busy:
                self._look_at(member, step, max(deadline - monotonic(), 0.0))
        return step.logprobs()

    def _deal(self, step: _Step) -> None:
        """Give passes that wait to who has the least to compute, as soon as that one has room."""
        while step.waiting:
            started = [member for member in self._members if member.starting is None]
            member = min(started, key=lambda member: member.load, default=None)
            if member is None or len(member.given) == AHEAD:
                return
            number = step.waiting.popleft()
            try:
                call = member.handle.call("score", step.message(number))
            except EngineLostError as error:
                step.waiting.appendleft(number)
                self._lose(member, error.cause, step)
                continue
            if not member.given:
                member.heard_at = monotonic()
            member.given.append((number, call))
            member.load += step.num_tokens(number)

    def _look_at(self, member: _Member, step: _Step, wait_s: float) -> None:
        """Take what a reference has scored, or judge its silence."""
        number, call = member.given[0]
        limit_s = self._timeout_s if member.has_scored else self._start_timeout_s
        try:
            values = call.result(wait_s)
        except TimeoutError:
            silent_s = monotonic() - member.heard_at
            if silent_s > limit_s:
                self._lose(member, f"it has not answered for {silent_s:.1f} s", step)
        except EngineLostError as error:
            self._lose(member, error.cause, step)
        except RuntimeError as error:  # of the device, which another process may get over
            self._lose(member, f"{type(error).__name__}: {error}", step)
        else:
            step.values[number] = torch.tensor(values)
            member.given.popleft()
            member.load -= step.num_tokens(number)
            member.has_scored, member.heard_at = True, monotonic()

    def _look_at_start(self, member: _Member, step: _Step) -> None:
        if member.starting is None:
            return
        try:
            member.starting.result(0.0)
        except TimeoutError:
            if monotonic() - member.heard_at > self._start_timeout_s:
                self._lose(member, "it has not started in time", step)
        except EngineLostError as error:
            self._lose(member, error.cause, step)
        except EnginesLostError:
            raise
        except (RuntimeError, ValueError, OSError) as error:
            self._lose(member, f"it could not be made: {error}", step)
        else:
            member.starting = None

    def _lose(self, member: _Member, cause: str, step: _Step) -> None:
        """Kill a reference, take its passes back, and start another in its place."""
        name = member.handle.name
        member.handle.kill()
        step.waiting.extendleft(number for number, _ in reversed(member.given))
        is_last = self._num_restarts == self._max_restarts
        if self._event is not None:
            restart = None if is_last else self._num_restarts + 1
            self._event("reference_lost", name=name, restart=restart, cause=cause)
        if is_last:
            raise EnginesLostError(
                f"{name} is lost, and {self._max_restarts} restarts of references have been used "
                f"up (cluster.max_engine_restarts). What it died of: {cause}"
            )
        handle = self._restart(member.index)
        self._num_restarts += 1
        _log.warning(
            "%s is lost and started anew (restart %d of at most %d); the %d passes it had are "
            "scored again: %s",
            name,
            self._num_restarts,
            self._max_restarts,
            len(member.given),
            cause,
        )
        self._members[member.index] = _new(member.index, handle)


def _new(index: int, handle: EngineHandle) -> _Member:
    """A reference that has been started; it answers its first call once it is there."""
    return _Member(index, handle, handle.call("score", []))
