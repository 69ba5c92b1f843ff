"""A pool of scorers: frozen models that score rows on devices of their own.

Rows come cut into passes: those of a step together, or of groups and samples as they end. A pass
goes to the scorer with the fewest tokens before it, in the order in which they come, so that all
end at about the same time where the largest are first. A scorer has two passes at most, one that it
computes and one that waits. Which scorer computes a pass cannot be seen in its numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Event
from time import monotonic, sleep
from typing import Any

import torch
from torch import Tensor

from hone.algorithms.algorithm import Outputs
from hone.config.algorithm import Output
from hone.config.cluster import ScorerName
from hone.distributed.pool import Member, Pending, Pool, Worker
from hone.types import EngineLostError, Row

__all__ = ["ScorerPool"]

AHEAD = 2
"""Passes that a scorer has at a time."""
WAIT_S = 0.02
"""Longest wait for one scorer before the others are looked at."""

_Rows = Sequence[Row]


@dataclass(frozen=True, slots=True)
class _Pass:
    rows: _Rows
    outputs: frozenset[Output]


@dataclass(slots=True, eq=False)
class _Job:
    """What one call has asked for."""

    rows: _Rows
    passes: Sequence[Sequence[int]]
    outputs: frozenset[Output]
    future: Future[list[Outputs]] = field(default_factory=Future[list[Outputs]])
    results: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Outputs of the passes that are through, [K, N]: those of the rows one after the other."""

    def found(self) -> list[Outputs]:
        names = sorted(self.outputs)
        kinds = {name: torch.int32 if name == "top_ids" else torch.float32 for name in names}
        found: list[Outputs] = [dict.fromkeys(names, torch.empty(0)) for _ in self.rows]
        for number, indices in enumerate(self.passes):
            lengths = [self.rows[i].num_trained for i in indices]
            values = self.results[number].split(lengths, dim=1)
            for i, of_row in zip(indices, values, strict=True):
                of_names = zip(names, of_row.clone(), strict=True)
                found[i] = {name: values.to(kinds[name]) for name, values in of_names}
        return found


@dataclass(slots=True, eq=False)
class _Member(Member[_Pass]):
    calls: deque[tuple[str, Pending]] = field(default_factory=deque[tuple[str, Pending]])
    """Of its passes, by id, in the order in which it computes them."""
    has_scored: bool = False


class ScorerPool(Pool[_Pass, _Member]):
    """What a frozen model says of rows, from several workers that have one each.

    Workers reach what has the method `score` of `hone.trainer.scorer.FrozenScorer`. The first pass,
    which may compile, may take `start_timeout_s` too.
    """

    task_words = "passes"

    def __init__(self, role: ScorerName, workers: Sequence[Worker], **supervision: Any) -> None:
        """Takes the arguments of `Pool`."""
        self.role = role
        first: Output = "values" if role == "reward_model" else "logprobs"
        self.first_call = ("score", [], frozenset({first}))
        super().__init__(workers, **supervision)
        self._new: SimpleQueue[_Job] = SimpleQueue()
        self._jobs: dict[int, _Job] = {}
        """Those that are under way, by number."""
        self._num_jobs = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"hone-{role}s")
        self._is_closed = Event()
        self._failure: BaseException | None = None

    def begin(
        self, rows: _Rows, passes: Sequence[Sequence[int]], outputs: frozenset[Output]
    ) -> Future[list[Outputs]]:
        """Score the trained tokens of `rows` in `passes`, lists of row indices, in the background.

        The future is of the `outputs` of each row, [N_i] or [N_i, K] on the CPU; one in no pass has
        no values. It raises WorkersLostError, and what a scorer refuses.
        """
        job = _Job(rows, passes, outputs)
        self._new.put(job)
        served = self._thread.submit(self._serve)  # takes it up where no earlier one does
        served.add_done_callback(self._on_end)
        return job.future

    def close(self) -> None:
        """End all scorers, and what they compute."""
        self._is_closed.set()
        self._thread.shutdown(cancel_futures=True)  # so that none is restarted after this
        for member in self._members:
            member.worker.kill()

    # -- in the thread ---------------------------------------------------------------------------

    def _serve(self) -> None:
        """Score until nothing is left."""
        if self._failure is not None:
            raise self._failure
        while self._take_new() or self._jobs:
            if self._is_closed.is_set():
                raise CancelledError(f"{self.role}s were closed")
            self._look_at_all()

    def _on_end(self, served: Future[None]) -> None:
        """What ends one call ends all, and later ones."""
        if served.cancelled() or (error := served.exception()) is None:
            return
        self._failure = error
        self._take_new()
        for job in self._jobs.values():
            job.future.set_exception(error)
        self._jobs.clear()

    def _take_new(self) -> bool:
        """Whether there was any."""
        taken = False
        while True:
            try:
                job = self._new.get_nowait()
            except Empty:
                return taken
            taken, number = True, self._num_jobs
            self._num_jobs += 1
            self._jobs[number] = job
            tasks = [_Pass([_inputs(job.rows[i]) for i in own], job.outputs) for own in job.passes]
            self._add((f"{number}/{n}", task) for n, task in enumerate(tasks))
            self._end(number)

    def _end(self, number: int) -> None:
        """Answer a call all of whose passes are through."""
        job = self._jobs[number]
        if len(job.results) == len(job.passes):
            del self._jobs[number]
            job.future.set_result(job.found())

    def _look_at_all(self) -> None:
        for index in range(len(self._members)):
            self._look_at_start(self._members[index])
        self._assign()
        busy = [member for member in self._members if member.calls]
        if not busy and self._jobs:
            sleep(WAIT_S)
        deadline = monotonic() + WAIT_S
        for member in busy:
            self._look_at(member, max(deadline - monotonic(), 0.0))

    def _look_at_start(self, member: _Member) -> None:
        if member.starting is None or self._poll_start(member, 0.0):
            return
        if self._is_live(member):
            member.note_silence()
            self._lose_silent(member, self._start_timeout_s, "it has not started")

    def _look_at(self, member: _Member, wait_s: float) -> None:
        """Take what a scorer has computed, or judge its silence."""
        task_id, call = member.calls[0]
        try:
            values = call.result(wait_s)
        except TimeoutError:
            limit_s = self._timeout_s if member.has_scored else self._start_timeout_s
            member.note_silence()
            self._lose_silent(member, limit_s, "it does not answer")
        except EngineLostError as error:
            self._lose(member, error.cause)
        except RuntimeError as error:  # of the device, which another process may get over
            self._lose(member, f"{type(error).__name__}: {error}")
        else:
            number, _, index = task_id.partition("/")
            self._jobs[int(number)].results[int(index)] = torch.tensor(values)
            member.calls.popleft()
            self._finish(member, task_id)
            member.has_scored = True
            member.note_progress()
            self._end(int(number))

    # -- as a pool -------------------------------------------------------------------------------

    def _new_member(self, index: int, worker: Worker, starting: Pending | None) -> _Member:
        return _Member(index, worker, starting)

    def _cost(self, task: _Pass) -> int:
        return sum(row.num_tokens for row in task.rows)

    def _has_room(self, member: _Member) -> bool:
        return len(member.tasks) < AHEAD

    def _send(self, member: _Member, tasks: Mapping[str, _Pass]) -> None:
        for task_id, task in tasks.items():
            if (call := self._call(member, "score", task.rows, task.outputs)) is not None:
                member.calls.append((task_id, call))

    def _on_start(self, member: _Member) -> None:
        member.is_ready = True
        member.note_progress()

    def _on_loss(self, member: _Member) -> None:
        member.calls.clear()


def _inputs(row: Row) -> Row:
    """What decides the outputs of a row, and nothing else of it."""
    return Row(id=row.id, group_id=row.group_id, token_ids=row.token_ids, loss_mask=row.loss_mask)
