"""A pool of remote scorers: frozen models (reference, teacher, reward model) on their own devices.

The caller splits rows into passes, for a whole step at once or for groups and samples as they
finish. A pass goes to the scorer with the fewest queued tokens, in order; if the largest passes
come first, all scorers finish at about the same time. A scorer has at most two passes, one that it
computes and one that waits. Results do not depend on which scorer computes a pass.
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
from hone.algorithms.settings import Output
from hone.distributed.pool import Member, Pending, Pool, Worker
from hone.distributed.settings import RoleName
from hone.images.sending import with_pixels
from hone.types import EngineLostError, Row

__all__ = ["ScorerPool"]

AHEAD = 2
"""Largest number of passes of a scorer at a time."""
WAIT_S = 0.02
"""Longest wait for one scorer before the others are checked."""

_Rows = Sequence[Row]


@dataclass(frozen=True, slots=True)
class _Pass:
    rows: _Rows
    outputs: frozenset[Output]


@dataclass(slots=True, eq=False)
class _Job:
    """One call of `begin`."""

    rows: _Rows
    passes: Sequence[Sequence[int]]
    outputs: frozenset[Output]
    future: Future[list[Outputs]] = field(default_factory=Future[list[Outputs]])
    results: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Outputs of finished passes by number, with the outputs' names sorted: [number of outputs, N]
    or [.., N, K], for the trained tokens of the pass's rows one after the other."""

    def outputs_by_row(self) -> list[Outputs]:
        names = sorted(self.outputs)
        dtypes = {name: torch.int32 if name == "top_ids" else torch.float32 for name in names}
        by_row: list[Outputs] = [dict.fromkeys(names, torch.empty(0)) for _ in self.rows]
        for number, indices in enumerate(self.passes):
            lengths = [self.rows[i].num_trained for i in indices]
            results = self.results[number].split(lengths, dim=1)
            for i, result in zip(indices, results, strict=True):
                named = zip(names, result.clone(), strict=True)
                by_row[i] = {name: values.to(dtypes[name]) for name, values in named}
        return by_row


@dataclass(slots=True, eq=False)
class _Member(Member[_Pass]):
    calls: deque[tuple[str, Pending]] = field(default_factory=deque[tuple[str, Pending]])
    """Pending calls of its passes with their ids, in the order in which it computes them."""
    has_scored: bool = False


class ScorerPool(Pool[_Pass, _Member]):
    """Scores rows by a frozen model, of which each of several workers has a copy.

    Each worker calls a remote object with the method `score` of `hone.trainer.frozen.FrozenScorer`.
    The first pass of a scorer may compile, so its limit is `start_timeout_s`.
    """

    task_words = "passes"

    def __init__(self, role: RoleName, workers: Sequence[Worker], **supervision: Any) -> None:
        """`supervision` are the arguments of `Pool`."""
        self.role = role
        first: Output = "values" if role == "reward_model" else "logprobs"
        self.first_call = ("score", [], frozenset({first}))
        super().__init__(workers, **supervision)
        self._new: SimpleQueue[_Job] = SimpleQueue()
        self._jobs: dict[int, _Job] = {}
        """Unfinished jobs, by number."""
        self._num_jobs = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"hone-{role}s")
        self._is_closed = Event()
        self._failure: BaseException | None = None

    def begin(
        self, rows: _Rows, passes: Sequence[Sequence[int]], outputs: frozenset[Output]
    ) -> Future[list[Outputs]]:
        """Score the trained tokens of `rows` in `passes`, lists of row indices, in the background.

        The future gives the `outputs` of each row, [N_i] or [N_i, K] on the CPU; a row in no pass
        has empty ones. It raises WorkersLostError, and the errors of scorers.
        """
        job = _Job(rows, passes, outputs)
        self._new.put(job)
        served = self._thread.submit(self._serve)  # ends at once where an earlier one took the job
        served.add_done_callback(self._on_end)
        return job.future

    def close(self) -> None:
        """End all scorers, also those that compute."""
        self._is_closed.set()
        self._thread.shutdown(cancel_futures=True)  # after this no scorer is restarted
        for member in self._members:
            member.worker.kill()

    # -- in the thread ---------------------------------------------------------------------------

    def _serve(self) -> None:
        """Serve jobs until none is left."""
        if self._failure is not None:
            raise self._failure
        while self._take_new() or self._jobs:
            if self._is_closed.is_set():
                raise CancelledError(f"{self.role}s were closed")
            self._look_at_all()

    def _on_end(self, served: Future[None]) -> None:
        """Pass an error to the futures of all jobs, and keep it for later jobs."""
        if served.cancelled() or (error := served.exception()) is None:
            return
        self._failure = error
        self._take_new()
        for job in self._jobs.values():
            job.future.set_exception(error)
        self._jobs.clear()

    def _take_new(self) -> bool:
        """Take new jobs from the queue; whether there was any."""
        taken = False
        while True:
            try:
                job = self._new.get_nowait()
            except Empty:
                return taken
            taken, number = True, self._num_jobs
            self._num_jobs += 1
            self._jobs[number] = job
            tasks = [
                _Pass([_inputs(job.rows[i]) for i in indices], job.outputs)
                for indices in job.passes
            ]
            self._add((f"{number}/{n}", task) for n, task in enumerate(tasks))
            self._end(number)

    def _end(self, number: int) -> None:
        """Set the result of a job once all of its passes are done."""
        job = self._jobs[number]
        if len(job.results) == len(job.passes):
            del self._jobs[number]
            job.future.set_result(job.outputs_by_row())

    def _look_at_all(self) -> None:
        self._check_starts()
        self._assign()
        busy = [member for member in self._members if member.calls]
        if not busy and self._jobs:
            sleep(WAIT_S)
        deadline = monotonic() + WAIT_S
        for member in busy:
            self._look_at(member, max(deadline - monotonic(), 0.0))

    def _look_at(self, member: _Member, wait_s: float) -> None:
        """Take the result of a scorer's first pass, or check how long it has been silent."""
        task_id, call = member.calls[0]
        try:
            values = call.result(wait_s)
        except TimeoutError:
            limit_s = self._timeout_s if member.has_scored else self._start_timeout_s
            member.note_silence()
            self._lose_silent(member, limit_s, "it does not answer")
        except EngineLostError as error:
            self._lose(member, error.cause)
        except RuntimeError as error:  # a device error, which a new process may not have
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
            rows = with_pixels(task.rows)
            if (call := self._call(member, "score", rows, task.outputs)) is not None:
                member.calls.append((task_id, call))

    def _on_start(self, member: _Member) -> None:
        member.is_ready = True
        member.note_progress()

    def _on_loss(self, member: _Member) -> None:
        member.calls.clear()


def _inputs(row: Row) -> Row:
    """A copy of a row with only the fields that determine its outputs."""
    return Row(
        id=row.id,
        group_id=row.group_id,
        token_ids=row.token_ids,
        loss_mask=row.loss_mask,
        model_input=row.model_input,
    )
