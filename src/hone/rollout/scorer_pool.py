"""A pool of scorers: frozen models that score rows on devices of their own.

The rows of a step come cut into passes. A pass goes to the scorer with the fewest tokens before it,
the largest passes first, so that all end at about the same time. A scorer has two passes at most,
one that it computes and one that waits, and no more of a step is ever sent. Which scorer computes a
pass cannot be seen in its numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from time import monotonic, sleep
from typing import Any

import torch
from torch import Tensor

from hone.algorithms.algorithm import Outputs
from hone.config.algorithm import Output
from hone.distributed.pool import Member, Pending, Pool, Worker
from hone.types import EngineLostError, Row

__all__ = ["ScorerPool"]

AHEAD = 2
"""Passes that a scorer has at a time."""
WAIT_S = 0.02
"""Longest wait for one scorer before the others are looked at."""

_Rows = Sequence[Row]


@dataclass(slots=True, eq=False)
class _Member(Member[_Rows]):
    calls: deque[tuple[str, Pending]] = field(default_factory=deque[tuple[str, Pending]])
    """Of its passes, by id, in the order in which it computes them."""
    has_scored: bool = False


class ScorerPool(Pool[_Rows, _Member]):
    """What a frozen model says of rows, from several workers that have one each.

    Workers reach `hone.trainer.scorer.FrozenScorer`s. The first pass, which may compile, may
    take `start_timeout_s` too.
    """

    role, task_words, first_call = "reference", "passes", ("score", [], frozenset({"logprobs"}))

    def __init__(self, workers: Sequence[Worker], **supervision: Any) -> None:
        """Takes the arguments of `Pool`."""
        super().__init__(workers, **supervision)
        self._results: dict[str, Tensor] = {}
        """Outputs of the passes of this step, [K, N]: those of the rows one after the other."""
        self._outputs: frozenset[Output] = frozenset()
        """Of this step."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hone-scorers")
        self._is_closed = Event()

    def begin(
        self, rows: _Rows, passes: Sequence[Sequence[int]], outputs: frozenset[Output]
    ) -> Future[list[Outputs]]:
        """Score the trained tokens of `rows` in `passes`, lists of row indices, in the background.

        The future is of the `outputs` of each row, [N_i] float32 on the CPU; one in no pass has no
        values. It raises WorkersLostError, and what a scorer refuses.
        """
        return self._thread.submit(self._score, rows, passes, outputs)

    def close(self) -> None:
        """End all scorers, and what they compute."""
        self._is_closed.set()
        self._thread.shutdown(cancel_futures=True)  # so that none is restarted after this
        for member in self._members:
            member.worker.kill()

    # -- in the thread ---------------------------------------------------------------------------

    def _score(
        self, rows: _Rows, passes: Sequence[Sequence[int]], outputs: frozenset[Output]
    ) -> list[Outputs]:
        self._results, self._outputs = {}, outputs
        self._add((f"{n}", [_inputs(rows[i]) for i in indices]) for n, indices in enumerate(passes))
        while len(self._results) < len(passes):
            if self._is_closed.is_set():
                raise CancelledError("references were closed")
            for index in range(len(self._members)):
                self._look_at_start(self._members[index])
            self._assign()
            busy = [member for member in self._members if member.calls]
            if not busy:
                sleep(WAIT_S)
            deadline = monotonic() + WAIT_S
            for member in busy:
                self._look_at(member, max(deadline - monotonic(), 0.0))
        names = sorted(outputs)
        found: list[Outputs] = [dict.fromkeys(names, torch.empty(0)) for _ in rows]
        for number, indices in enumerate(passes):
            lengths = [rows[i].num_trained for i in indices]
            values = self._results[f"{number}"].split(lengths, dim=1)
            for i, of_row in zip(indices, values, strict=True):
                found[i] = dict(zip(names, of_row.clone(), strict=True))
        return found

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
            self._results[task_id] = torch.tensor(values)
            member.calls.popleft()
            self._finish(member, task_id)
            member.has_scored = True
            member.note_progress()

    # -- as a pool -------------------------------------------------------------------------------

    def _new_member(self, index: int, worker: Worker, starting: Pending | None) -> _Member:
        return _Member(index, worker, starting)

    def _cost(self, task: _Rows) -> int:
        return sum(row.num_tokens for row in task)

    def _has_room(self, member: _Member) -> bool:
        return len(member.tasks) < AHEAD

    def _send(self, member: _Member, tasks: Mapping[str, _Rows]) -> None:
        for task_id, rows in tasks.items():
            if (call := self._call(member, "score", rows, self._outputs)) is not None:
                member.calls.append((task_id, call))

    def _on_start(self, member: _Member) -> None:
        member.is_ready = True
        member.note_progress()

    def _on_loss(self, member: _Member) -> None:
        member.calls.clear()


def _inputs(row: Row) -> Row:
    """What decides the outputs of a row, and nothing else of it."""
    return Row(id=row.id, group_id=row.group_id, token_ids=row.token_ids, loss_mask=row.loss_mask)
