"""The parent process of all workers of one pool. It forks workers, gives each one sample at a time,
kills a worker at its deadline, and leaves no process behind.

It is a small process, started fresh, so that the driver may have threads and a GPU, and it runs no
other code, so that it may fork. Where a function is an object of the driver, which a fresh process
cannot import, it is a fork of the driver. It imports math-verify once, so a new worker starts in
milliseconds. It works while the driver is busy, adopts the processes that workers leave behind, and
kills everything and ends when the driver is gone.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import psutil

from hone.errors import UserError
from hone.rewards import wire
from hone.rewards.builtin import warm_up_math
from hone.rewards.environment import EnvFacts
from hone.rewards.jail import remove_tree
from hone.rewards.pool import ONE_THREAD, describe_exit
from hone.rewards.process_tree import num_descendants
from hone.rewards.score import Verdict
from hone.rewards.worker import (
    CLOSE,
    NO_SESSION,
    START,
    Job,
    become_subreaper,
    encode_request,
    outlive_signals,
    session_of,
    size_of,
    ticket_of,
    work,
)
from hone.types import FailureKind, Observation, Reward, StopReason

__all__ = ["ForkServer", "main", "serve_forked"]

OUT_OF_MEMORY_EXIT = 99
"""Exit code of a worker that ran out of memory and could not report it."""

MAX_PROCESSES = 256
"""Largest number of running processes that one worker may have started. A worker with more is taken
for a fork bomb, which could stop the machine before its deadline."""

MAX_STARTING = 2 * (os.cpu_count() or 1)
"""Most workers that import the user's modules at a time; more would only compete for cores."""

_CHECK_DRIVER_S = 2.0
_COUNT_S = 0.5
"""Seconds between two counts of workers' processes; only calls longer than this are counted."""
_COUNT_SHARE = 0.05
"""Largest share of time for counting, on hosts with many processes."""
_SHUT_DOWN_S = 4.0
"""Limit for killing everything; only a process stuck in the kernel takes more than milliseconds."""


@dataclass(slots=True)
class _Worker:
    pid: int
    stream: wire.Stream
    since: float = field(default_factory=time.monotonic)
    """Start of its current call, or of the import of the functions."""
    is_ready: bool = False
    """Whether it has loaded the functions."""
    request: bytes | None = None
    """The request that it is working on."""
    function: int | None = None
    """Index of the function that it is calling; None before the first call."""
    num_calls: int = 0
    """Calls of functions that it has reported for its request."""
    session: int = 0
    """The session that it holds, and whose requests alone it serves; 0: none."""
    is_closing: bool = False
    """Whether it is closing its session, which has a deadline like a call."""
    must_close: bool = False
    """Whether its session is to be closed once its call has ended."""
    is_ending: bool = False
    """Whether it gets no more samples: it ran out of memory, or is being killed."""
    is_overdue: bool = False
    """Whether it is killed because of its deadline."""
    num_processes: int = 0
    """Number of its processes, set when it is killed because of them."""
    malformed: str = ""
    """Description of an invalid message, set when it is killed because of it."""

    @property
    def is_waiting(self) -> bool:
        """Whether it has nothing to do; a session that it holds waits for a turn of the policy."""
        return self.is_ready and self.request is None and not self.is_closing


class ForkServer:
    """The event loop over workers and samples, in one thread that never blocks."""

    def __init__(self, control: socket.socket, job: Job) -> None:
        self.job = job
        self.driver = wire.Stream(control, max_bytes=None)
        self.queue: deque[bytes] = deque()
        self.workers: dict[int, _Worker] = {}  # by process id
        self.holders: dict[int, _Worker] = {}  # by session
        self.lost: dict[int, str] = {}
        """Why the process of a session ended between two turns, by session."""
        self.max_workers = job.num_workers
        self.has_failed = False
        """Whether the functions cannot be loaded; then no more workers start."""
        self.child_ended, wake = socket.socketpair()
        self.child_ended.setblocking(False)
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # it only has to wake up `select`
        self.wake = wake
        self.next_count = 0.0
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.child_ended, selectors.EVENT_READ)

    def run(self) -> None:
        if not self.has_failed:
            self._fork()
        while os.getppid() == self.job.driver_pid:
            self._watch(self.driver)
            for worker in self.workers.values():
                self._watch(worker.stream)
            ready = {key.fileobj for key, _ in self.selector.select(self._kill_overdue())}
            self._from_driver()
            if self.driver.ended:
                return
            for worker in self.workers.values():
                if worker.stream.sock in ready:
                    self._from_worker(worker)
                    if worker.malformed:
                        _kill_worker(worker)
            if self.child_ended in ready:
                self.child_ended.recv(1 << 12)
                self._handle_exits()
            self._dispatch()

    def shut_down(self) -> None:
        """Kill all workers and all of their descendants; return when none is left."""
        give_up = time.monotonic() + _SHUT_DOWN_S
        while (left := psutil.Process().children(recursive=True)) and time.monotonic() < give_up:
            for child in left:
                _kill(child)
            self._reap()
            time.sleep(0.001)
        if self.job.scratch is not None:
            remove_tree(Path(self.job.scratch))

    def fail(self, error: str) -> None:
        """Send the driver the reason why the functions cannot be loaded; it then closes."""
        if not self.has_failed:
            self.has_failed = True
            self.driver.put(pickle.dumps(("error", error)))

    # ---- samples ---------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Give queued samples to idle workers, and start workers for the rest."""
        for worker in self._idle():
            if self.queue:
                self._give(worker, self.queue.popleft())
        num_starting = sum(not worker.is_ready for worker in self.workers.values())
        num_wanted = min(len(self.queue), MAX_STARTING)
        while len(self.workers) < self.max_workers and num_starting < num_wanted:
            if self.has_failed:
                return
            self._fork()
            num_starting += 1

    def _idle(self) -> list[_Worker]:
        return [
            worker
            for worker in self.workers.values()
            if worker.is_waiting and not worker.is_ending and not worker.session
        ]

    def _give(self, worker: _Worker, request: bytes) -> None:
        session, kind = session_of(request)
        worker.request, worker.function, worker.num_calls = request, None, 0
        worker.since = time.monotonic()
        if kind == START:
            worker.session = session
            self.holders[session] = worker
        worker.stream.put(request)

    def _to_session(self, session: int, kind: int, request: bytes) -> None:
        """Pass a request to the worker that holds its session."""
        worker = self.holders.get(session)
        if worker is not None and kind != CLOSE:
            assert worker.is_waiting, "a session answers one turn at a time"
            self._give(worker, request)
        elif worker is not None:
            worker.must_close = True
            self._close_session(worker)
        elif kind != CLOSE:
            why = self.lost.pop(session, "its process ended")
            detail = f"{self.job.names[-1]}: between two turns, {why}"
            verdict = Verdict(failure=FailureKind.CRASH, detail=detail, is_session_lost=True)
            self.driver.put(pickle.dumps(("verdict", ticket_of(request), verdict, False)))
        else:
            self.lost.pop(session, None)
            self.queue = deque(r for r in self.queue if session_of(r)[0] != session)

    def _close_session(self, worker: _Worker) -> None:
        """Close the session of a worker that is to be closed, unless a call is running."""
        if worker.must_close and worker.is_waiting:
            worker.must_close, worker.is_closing = False, True
            worker.since = time.monotonic()
            worker.stream.put(encode_request(-1, [], None, session=worker.session, kind=CLOSE))

    def _from_driver(self) -> None:
        self.driver.flush()
        for request in self.driver.take():
            if not request:  # the driver cancels all samples
                self.queue.clear()
                continue
            session, kind = session_of(request)
            if kind in (NO_SESSION, START):
                self.queue.append(request)
            else:
                self._to_session(session, kind, request)

    def _from_worker(self, worker: _Worker) -> None:
        worker.stream.flush()
        try:
            for body in worker.stream.take():
                self._read(worker, json.loads(body))
        except Exception as error:  # noqa: BLE001 - user code runs there, and may send anything
            cause = f"{type(error).__name__}: {error}"[:300]
            worker.malformed = f"its worker sent something that is not a verdict: {cause}"

    def _read(self, worker: _Worker, message: Mapping[str, Any]) -> None:
        if worker.is_ready and ("error" in message or "signatures" in message):
            raise ValueError("it said what it has loaded once more")
        if "error" in message:
            self.fail(str(message["error"]))
        elif "signatures" in message:
            worker.is_ready = True
            warnings = list(map(str, message["warnings"]))
            facts = None if message["env"] is None else _facts(message["env"])
            if facts is not None and facts.has_sessions and self.job.env is not None:
                # Twice as many: those of an evaluation come to those of training, which wait.
                self.max_workers = self.job.num_workers + 2 * self.job.env.max_sessions
            self.driver.put(pickle.dumps(("signatures", message["signatures"], warnings, facts)))
        elif "closed" in message:
            self._forget_session(worker)
        elif "function" in message:
            worker.function = range(len(self.job.names))[message["function"]]
            worker.since = time.monotonic()
            worker.num_calls += 1
            if worker.num_calls > 2 * len(self.job.names) + 2:  # each call has a deadline
                raise ValueError("it calls the same function again and again")
        else:
            if worker.request is None or message["ticket"] != ticket_of(worker.request):
                raise ValueError("a verdict on a sample that it was not scoring")
            verdict = _decode(message)
            num = size_of(worker.request)
            if verdict.failure is None and (
                len(verdict.of_group) != num or ("of_group" in message) is not (num > 0)
            ):
                raise ValueError("a verdict on more or fewer samples than it was scoring")
            if verdict.observation is not None and self.job.env is None:
                raise ValueError("an observation, and there is no environment")
            self._settle(worker, verdict)

    def _settle(self, worker: _Worker, verdict: Verdict) -> None:
        assert worker.request is not None
        ticket, worker.request = ticket_of(worker.request), None
        worker.is_ending |= verdict.failure is FailureKind.OUT_OF_MEMORY
        if worker.session and verdict.observation is None:
            worker.is_closing = True  # it closes the session by itself
            worker.since = time.monotonic()
        self._close_session(worker)
        self.driver.put(pickle.dumps(("verdict", ticket, verdict, worker.is_overdue)))

    def _forget_session(self, worker: _Worker) -> None:
        self.holders.pop(worker.session, None)
        worker.session, worker.is_closing, worker.must_close = 0, False, False

    def _watch(self, stream: wire.Stream) -> None:
        """Register the socket for reading, and for writing only while data is queued."""
        known = self.selector.get_map().get(stream.sock)
        if stream.ended:
            if known is not None:
                self.selector.unregister(stream.sock)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if stream.has_outgoing else 0)
        if known is None:
            self.selector.register(stream.sock, events)
        elif known.events != events:
            self.selector.modify(stream.sock, events)

    # ---- processes -------------------------------------------------------------------------------

    def _fork(self) -> None:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _be_worker(theirs, self.job)
        theirs.close()
        self.workers[pid] = _Worker(pid, wire.Stream(ours, max_bytes=self.job.max_result_bytes))

    def _kill_overdue(self) -> float:
        """Kill workers past their deadline; return the seconds until the next deadline."""
        now = time.monotonic()
        wait = min(_CHECK_DRIVER_S, self.job.timeout_s)
        if self.workers:
            self._kill_forking(now)
            wait = min(wait, max(self.next_count - time.monotonic(), 0.0))
        for worker in self.workers.values():
            if worker.is_waiting:
                continue
            left = worker.since + self._limit_s(worker) - now
            if left > 0:
                wait = min(wait, left)
            elif not worker.is_overdue:
                worker.is_overdue = True
                _kill_worker(worker)
        return wait

    def _kill_forking(self, now: float) -> None:
        """Kill workers with too many processes; calls shorter than `_COUNT_S` are not counted."""
        if now < self.next_count:
            return
        for worker in self.workers.values():
            if not worker.is_waiting and now - worker.since > _COUNT_S and not worker.num_processes:
                number = num_descendants(worker.pid)
                if number > MAX_PROCESSES:
                    worker.num_processes = number
                    _kill_worker(worker)
        taken_s = time.monotonic() - now
        self.next_count = now + max(_COUNT_S, taken_s / _COUNT_SHARE)

    def _handle_exits(self) -> None:
        for worker, status in self._reap():
            with contextlib.suppress(OSError):
                os.killpg(worker.pid, signal.SIGKILL)  # where no orphans are adopted (macOS)
            if not worker.malformed:
                self._from_worker(worker)  # what it sent before it ended
            worker.stream.ended = True
            self._watch(worker.stream)
            worker.stream.close()
            self._remove_folder(worker)
            kind, detail = self._why_it_ended(worker, status)
            if not worker.is_ready:
                self.fail(f"importing {self.job.described}: {detail}")
            elif worker.request is not None and (worker.function is not None or worker.malformed):
                detail = f"{self.job.names[worker.function or 0]}: {detail}"
                seconds = time.monotonic() - worker.since
                is_lost = worker.function == len(self.job.functions) and worker.session > 0
                verdict = Verdict(
                    failure=kind, detail=detail, seconds=seconds, is_session_lost=is_lost
                )
                self._settle(worker, verdict)
            elif worker.request is not None and session_of(worker.request)[1] in _AGAIN:
                if not worker.must_close:
                    self.queue.appendleft(worker.request)  # it had not begun with this one
            elif worker.request is not None:
                is_lost = worker.session > 0
                verdict = Verdict(failure=kind, detail=detail, is_session_lost=is_lost)
                self._settle(worker, verdict)
            elif worker.session and not worker.is_closing:
                self.lost[worker.session] = detail
            self._forget_session(worker)
        for child in psutil.Process().children():
            if child.pid not in self.workers:  # an orphan of a dead worker, adopted by this process
                _kill(child)

    def _remove_folder(self, worker: _Worker) -> None:
        """Remove the folder of a worker's programs. Where that fails, since one of them still runs,
        `shut_down` removes it."""
        if self.job.scratch is not None:
            with contextlib.suppress(OSError):
                remove_tree(_folder_of(self.job.scratch, worker.pid))

    def _reap(self) -> list[tuple[_Worker, int]]:
        """Reap all ended children; return the workers among them with their exit codes."""
        dead: list[tuple[_Worker, int]] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return dead
            if pid == 0:
                return dead
            if worker := self.workers.pop(pid, None):
                dead.append((worker, os.waitstatus_to_exitcode(status)))

    def _why_it_ended(self, worker: _Worker, status: int) -> tuple[FailureKind, str]:
        if worker.malformed:
            return FailureKind.CRASH, worker.malformed
        if worker.num_processes:
            return FailureKind.CRASH, (
                f"killed, since it had started {worker.num_processes:,} processes; at most "
                f"{MAX_PROCESSES} are allowed at a time"
            )
        if worker.is_overdue:
            return FailureKind.TIMEOUT, f"killed after {self._limit_s(worker):g} s"
        if status == OUT_OF_MEMORY_EXIT:
            return FailureKind.OUT_OF_MEMORY, "ran out of memory (`reward.memory_limit_gib`)"
        return FailureKind.CRASH, f"its process ended: {describe_exit(status)}"

    def _limit_s(self, worker: _Worker) -> float:
        if not worker.is_ready:
            return self.job.load_timeout_s
        is_in_env = worker.is_closing or worker.function == len(self.job.functions)
        if worker.session and is_in_env and self.job.env is not None:
            return self.job.env.timeout_s
        return self.job.timeout_s


def _facts(message: Mapping[str, Any]) -> EnvFacts:
    return EnvFacts(
        shape=str(message["shape"]),
        has_sessions=bool(message["has_sessions"]),
        tools=tuple(map(dict, message["tools"])),
        needs_tool_format=bool(message["needs_tool_format"]),
    )


_AGAIN = (NO_SESSION, START)
"""Requests that another worker can serve as well."""


def _decode(message: Mapping[str, Any]) -> Verdict:
    seconds = float(message["seconds"])
    if "failure" in message:
        return Verdict(
            failure=FailureKind(message["failure"]),
            detail=str(message["detail"]),
            is_certain=bool(message["is_certain"]),
            is_session_lost=bool(message["is_session_lost"]),
            seconds=seconds,
        )
    if "of_group" in message:
        return Verdict(of_group=tuple(map(_decode, message["of_group"])), seconds=seconds)
    if "observation" in message:
        return Verdict(observation=_observation(message["observation"]), seconds=seconds)
    parts = {str(name): float(value) for name, value in message["parts"].items()}
    reason = message["stop_reason"]
    return Verdict(
        reward=Reward(
            total=float(message["total"]), parts=parts, is_partial=bool(message["is_partial"])
        ),
        stop_reason=None if reason is None else StopReason(reason),
        seconds=seconds,
    )


def _observation(message: Mapping[str, Any]) -> Observation:
    content, longest = message["content"], message["max_tokens"]
    if not isinstance(content, str):
        content = tuple(dict(item) for item in content)
    return Observation(
        content,
        None if message["role"] is None else str(message["role"]),
        token_ids=tuple(int(number) for number in message["token_ids"]),
        reward=float(message["reward"]),
        max_tokens=None if longest is None else int(longest),
        stop=tuple(str(text) for text in message["stop"]),
        state=message["state"],
    )


def _folder_of(scratch: str, pid: int) -> Path:
    return Path(scratch) / str(pid)


def _kill(child: psutil.Process) -> None:
    try:
        child.kill()
    except psutil.Error:
        return  # it is gone, or has changed its user


def _kill_worker(worker: _Worker) -> None:
    """Kill a worker that has not been reaped, and its process group."""
    worker.is_ending = True
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(worker.pid, signal.SIGKILL)  # it does not lead a group yet


def _be_worker(sock: socket.socket, job: Job) -> NoReturn:
    outlive_signals()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Close all inherited descriptors: the sockets of the driver and of other workers.
    os.closerange(3, sock.fileno())
    os.closerange(sock.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    try:
        folder = None
        if job.scratch is not None:
            folder = _folder_of(job.scratch, os.getpid())
            folder.mkdir(mode=0o711)
        work(sock, job, folder)
    except MemoryError:
        os._exit(OUT_OF_MEMORY_EXIT)  # not even the verdict could be written
    finally:
        os._exit(1)  # after any exception: a worker must never return into the fork server's loop


def main() -> None:
    """Serve the driver at the other end of the socket whose descriptor is the first argument."""
    outlive_signals()
    control = socket.socket(fileno=int(sys.argv[1]))
    greeting = wire.receive(control)
    if greeting is None:
        return
    _serve(control, pickle.loads(greeting))


def serve_forked(control: socket.socket, job: Job) -> NoReturn:
    """Serve the driver in a fork of it, like a fresh process."""
    try:  # whatever fails here, a second copy of the driver's program must not continue
        _leave_driver(control)
        _serve(control, job)
        os._exit(0)
    finally:
        os._exit(1)


def _leave_driver(control: socket.socket) -> None:
    """Give up everything that a fork shares with the driver, except `control`."""
    os.setsid()
    outlive_signals()
    signal.set_wakeup_fd(-1)
    # Close the driver's descriptors: locks, sockets, the streams of a notebook.
    os.closerange(3, control.fileno())
    os.closerange(control.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    os.close(null)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    os.environ |= ONE_THREAD
    if "torch" in sys.modules:  # its thread pool exists only in the driver
        sys.modules["torch"].set_num_threads(1)


def _serve(control: socket.socket, job: Job) -> None:
    become_subreaper()
    fork_server = ForkServer(control, job)
    try:
        if any(function.spec == "math" for function in job.functions):
            warm_up_math()
    except UserError as error:
        fork_server.fail(str(error))
    gc.freeze()  # forks then share these pages
    try:
        fork_server.run()
    finally:
        fork_server.shut_down()


if __name__ == "__main__":
    main()
