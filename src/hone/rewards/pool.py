"""The driver's side of the worker processes: who gets which sample, and what became of it.

Nothing here blocks longer than asked, and nothing here runs code of users. A worker holds a few
samples at a time, as many as it scores in about `PREFETCH_S`, and works through them in order.

Where a worker ends, the sample it was scoring fails and the others that it held go to another one.
Where a worker is stuck, the others do not wait for its deadline: they go to another one at once.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.config.errors import UserError
from hone.config.hardware import num_usable_cores
from hone.rewards import wire
from hone.rewards.fork_server import COMMAND, FORK, KILL, MAX_PROCESSES, OUT_OF_MEMORY_EXIT
from hone.rewards.score import Verdict
from hone.rewards.worker import LOADING, Job, encode_request
from hone.types import FailureKind, Reward

__all__ = ["Pool", "default_num_workers"]

_log = logging.getLogger(__name__)

PREFETCH_S = 0.05
"""Work that a worker holds in advance, so that it need not wait for the driver's next poll."""
MAX_PREFETCH = 32
STALL_S = 0.2
"""A worker silent for so long is stuck as far as the samples behind the current one go."""
FORK_SERVER = "hone.rewards.fork_server"
_CLOSE_S = 5.0
_SLOW_IMPORT_S = 10.0
"""Time between warnings of an import that takes long."""
_PROCESSES_ALLOWED = f"at most {MAX_PROCESSES} are allowed at a time"


@dataclass(slots=True)
class _Worker:
    number: int
    stream: wire.Stream
    tickets: deque[int] = field(default_factory=deque[int])
    """Samples it holds, in order."""
    last_heard: float = field(default_factory=time.monotonic)
    ready: bool = False
    stalled: bool = False
    """Silent for `STALL_S`; what it holds behind the current sample went to others."""
    malformed: str = ""
    has_delivered: bool = False


class Pool:
    """Scores samples in killable processes. Workers start when there is work for them.

    The first one starts at once. Raises ValueError where it cannot load the functions; `poll` does
    so for later ones.
    """

    def __init__(self, job: Job, *, num_workers: int) -> None:
        self.num_workers = num_workers
        self.num_kills = 0
        """Workers killed at a deadline."""
        self.num_restarts = 0
        """Workers started in place of one that ended."""
        self.needed_columns: list[list[str]] = []
        """Of the data, by function."""
        self._job = job
        self._requests: dict[int, bytes] = {}  # by ticket, until the verdict
        self._queue: deque[int] = deque()
        self._workers: dict[int, _Worker] = {}
        self._verdicts: list[tuple[int, Verdict]] = []
        self._num_started = 0
        self._num_vacant = 0
        self._seconds_per_sample = PREFETCH_S  # moving average
        self._selector = selectors.DefaultSelector()
        self._process, self._control = _start_fork_server(job)
        self._selector.register(self._control.sock, selectors.EVENT_READ)
        try:
            first, started, warned_s = self._start_worker(), time.monotonic(), 0.0
            while not first.ready:
                self._handle_events(None)
                if (seconds := time.monotonic() - started) > warned_s + _SLOW_IMPORT_S:
                    warned_s = seconds
                    _log.warning(
                        "importing the reward functions (%s) has taken %.0f s; after %g s it fails",
                        self._specs(),
                        seconds,
                        job.load_timeout_s,
                    )
        except BaseException:
            self.close()
            raise

    def submit(self, ticket: int, given: Mapping[str, Any]) -> None:
        """Queue one sample, to be scored from `given` (see `score.arguments`)."""
        assert ticket not in self._requests, f"{ticket=}"
        self._requests[ticket] = encode_request(ticket, dict(given))
        self._queue.append(ticket)
        self._dispatch()

    def poll(self, timeout_s: float) -> list[tuple[int, Verdict]]:
        """Tickets and verdicts since the last poll; waits at most `timeout_s` for the first."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = max(0.0, deadline - time.monotonic())
            self._handle_events(0.0 if self._verdicts or not self._requests else left)
            self._dispatch()
            if self._verdicts or not self._requests or time.monotonic() >= deadline:
                verdicts, self._verdicts = self._verdicts, []
                return verdicts

    def cancel(self) -> None:
        """Give up on all samples: no verdict comes of them. What workers hold they still score."""
        self._requests.clear()
        self._queue.clear()
        self._verdicts.clear()

    def close(self) -> None:
        """Kill all workers and whatever they started; return when they are gone."""
        self._selector.close()
        for worker in self._workers.values():
            worker.stream.close()
        self._workers.clear()
        self._control.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    # ---- events ----------------------------------------------------------------------------------

    def _handle_events(self, timeout_s: float | None) -> None:
        wait = STALL_S if timeout_s is None else min(timeout_s, STALL_S)
        for key, _ in self._selector.select(wait):
            worker: _Worker | None = key.data
            if worker is None:
                self._read_control()
            elif worker.number in self._workers:
                worker.stream.flush()
                self._read_results(worker)
                self._watch(worker)

    def _read_control(self) -> None:
        for body in self._control.take():
            message = json.loads(body)
            if error := message.get("error"):
                raise ValueError(error)  # the fork server cannot serve this job
            self._worker_ended(message)
        if self._control.ended:
            raise self._fork_server_ended()

    def _read_results(self, worker: _Worker) -> None:
        try:
            for body in worker.stream.take():
                self._read_result(worker, json.loads(body))
        except (wire.ProtocolError, ValueError, KeyError, TypeError) as error:
            if not worker.ready:
                raise  # the functions cannot be loaded
            worker.malformed = f"its worker sent something that is not a verdict: {error}"
            self._command(KILL, worker.number)

    def _read_result(self, worker: _Worker, message: Mapping[str, Any]) -> None:
        worker.last_heard = time.monotonic()
        worker.stalled = False
        if error := message.get("error"):
            raise ValueError(error)
        if "ready" in message:
            self.needed_columns = message["columns"]
            worker.ready = True
            return
        ticket = int(message["ticket"])
        if not worker.tickets or ticket != worker.tickets[0]:
            raise ValueError(f"a verdict on sample {ticket}, which it was not scoring")
        verdict = _decode(message)
        worker.tickets.popleft()
        worker.has_delivered = True
        self._seconds_per_sample += 0.1 * (verdict.seconds - self._seconds_per_sample)
        self._settle(ticket, verdict)

    def _worker_ended(self, report: Mapping[str, Any]) -> None:
        worker = self._workers.pop(report["worker"])
        if not worker.malformed:
            self._read_results(worker)  # what it sent before it ended
        if not worker.ready:
            raise self._load_error(report)
        worker.stream.ended = True
        self._watch(worker)
        worker.stream.close()
        self._num_vacant += 1
        self.num_kills += report["overdue"]
        victim: int | None = report["ticket"]
        if worker.tickets and (worker.malformed or (victim is None and not worker.has_delivered)):
            victim = worker.tickets[0]  # the first without a verdict that could be read
        if victim is not None:
            self._settle(victim, self._failed(worker, report))
        self._requeue(worker.tickets)

    def _load_error(self, report: Mapping[str, Any]) -> ValueError:
        """Why a worker ended before it was ready and without an error."""
        if report["processes"]:
            problem = f"started {report['processes']:,} processes; {_PROCESSES_ALLOWED}"
        elif report["overdue"]:
            problem = f"took longer than {self._job.load_timeout_s:g} s"
        elif report["status"] == OUT_OF_MEMORY_EXIT:
            problem = "needed more memory than `reward.memory_limit_gib`"
        else:
            problem = f"ended the process ({_describe_exit(report['status'])})"
        return ValueError(f"importing the reward functions ({self._specs()}) {problem}")

    def _specs(self) -> str:
        return ", ".join(function.spec for function in self._job.functions)

    def _failed(self, worker: _Worker, report: Mapping[str, Any]) -> Verdict:
        index: int = report["function"]
        name = self._job.functions[index].name if index != LOADING else "loading"
        status: int = report["status"]
        if worker.malformed:
            kind, detail = FailureKind.CRASH, worker.malformed
        elif report["processes"]:
            started = f"killed, since it had started {report['processes']:,} processes"
            kind, detail = FailureKind.CRASH, f"{started}; {_PROCESSES_ALLOWED}"
        elif report["overdue"]:
            kind, detail = FailureKind.TIMEOUT, f"killed after {self._job.timeout_s:g} s"
        elif status == OUT_OF_MEMORY_EXIT:
            kind, detail = FailureKind.OUT_OF_MEMORY, "ran out of memory"
        else:
            kind, detail = FailureKind.CRASH, f"its process ended: {_describe_exit(status)}"
        return Verdict(failure=kind, detail=f"{name}: {detail}", seconds=report["seconds"])

    def _settle(self, ticket: int, verdict: Verdict) -> None:
        """Keep the first verdict on a ticket; a stuck worker may come up with a second one."""
        if self._requests.pop(ticket, None) is not None:
            self._verdicts.append((ticket, verdict))

    def _requeue(self, tickets: Iterable[int]) -> None:
        """Put samples that nobody has scored yet back to the front of the queue."""
        again = [t for t in tickets if t in self._requests and t not in self._queue]
        self._queue.extendleft(reversed(again))

    # ---- work ------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Give queued samples to workers, the least busy first, and start workers for the rest."""
        self._take_back_from_stalled()
        prefetch = int(PREFETCH_S / max(self._seconds_per_sample, 1e-6))
        depth = min(max(prefetch, 1), MAX_PREFETCH)
        usable = [w for w in self._workers.values() if w.ready and not (w.stalled or w.malformed)]
        while self._queue and usable:
            worker = min(usable, key=lambda w: len(w.tickets))
            if len(worker.tickets) >= depth:
                break
            ticket = self._queue.popleft()
            if ticket in self._requests:  # else settled by a worker that seemed stuck
                self._give(worker, ticket)
        num_starting = sum(not worker.ready for worker in self._workers.values())
        while len(self._workers) < self.num_workers and num_starting < len(self._queue):
            self._start_worker()
            num_starting += 1

    def _give(self, worker: _Worker, ticket: int) -> None:
        if not worker.tickets:
            worker.last_heard = time.monotonic()
        worker.tickets.append(ticket)
        worker.stream.put(self._requests[ticket])
        self._watch(worker)

    def _take_back_from_stalled(self) -> None:
        silent_since = time.monotonic() - STALL_S
        for worker in self._workers.values():
            waiting = worker.ready and not worker.stalled and len(worker.tickets) > 1
            if waiting and worker.last_heard < silent_since:
                worker.stalled = True
                self._requeue(list(worker.tickets)[1:])

    def _start_worker(self) -> _Worker:
        ours, theirs = socket.socketpair()
        number = self._num_started
        with theirs:
            self._command(FORK, number, fds=[theirs.fileno()])
        self._num_started += 1
        if self._num_vacant:
            self._num_vacant -= 1
            self.num_restarts += 1
        worker = self._workers[number] = _Worker(number, wire.Stream(ours))
        self._watch(worker)
        return worker

    def _command(self, what: bytes, number: int, fds: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._control.sock, [COMMAND.pack(what, number)], fds)
        except ConnectionError:
            raise self._fork_server_ended() from None

    def _fork_server_ended(self) -> UserError:
        how = _describe_exit(self._process.wait(_CLOSE_S))
        names = ", ".join(function.spec for function in self._job.functions)
        return UserError(
            f"the parent process of the reward workers ended ({how}). Either a function of "
            f"reward.functions ({names}) has ended it, as os.killpg and os.getppid allow: it may "
            "end processes that it has started alone; or the kernel has, for want of memory."
        )

    def _watch(self, worker: _Worker) -> None:
        """Wake up for what the worker's socket can do next, and for nothing else."""
        sock = worker.stream.sock
        known = sock in self._selector.get_map()
        if worker.stream.ended or worker.malformed:
            if known:
                self._selector.unregister(sock)
            return
        writing = selectors.EVENT_WRITE if worker.stream.has_outgoing else 0
        change = self._selector.modify if known else self._selector.register
        change(sock, selectors.EVENT_READ | writing, worker)


def _start_fork_server(job: Job) -> tuple[subprocess.Popen[bytes], wire.Stream]:
    ours, theirs = socket.socketpair()
    # One worker a core: a thread pool in each would only make them fight.
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", FORK_SERVER, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ | one_thread,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    wire.send(ours, pickle.dumps(job))
    return process, wire.Stream(ours)


def _decode(message: Mapping[str, Any]) -> Verdict:
    seconds = float(message["seconds"])
    if "failure" in message:
        kind = FailureKind(message["failure"])
        return Verdict(
            failure=kind,
            detail=str(message["detail"]),
            is_certain=bool(message["is_certain"]),
            seconds=seconds,
        )
    parts = {str(name): float(value) for name, value in message["parts"].items()}
    return Verdict(reward=Reward(total=float(message["total"]), parts=parts), seconds=seconds)


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    name = signal.Signals(-status).name
    hint = ", perhaps by the kernel for want of memory" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


def default_num_workers() -> int:
    """One worker per CPU core that this process may use, at most 16."""
    return min(num_usable_cores(), 16)
