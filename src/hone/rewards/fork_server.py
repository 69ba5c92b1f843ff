"""The parent of all workers of one pool: forks them, gives each one sample at a time, kills it at
its deadline, and leaves no process behind.

It is a small process of its own, started fresh (so the driver may hold threads and a GPU) and
running no code but this (so it may fork). Where a function is the driver's own, which a fresh
process cannot import, it is a fork of the driver. It imports math-verify once, so a new worker
costs milliseconds. It goes on while the driver is busy elsewhere, adopts what workers leave behind,
and when the driver disappears, however it does, it kills everything and ends.
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
from hone.rewards.jail import remove_tree
from hone.rewards.pool import ONE_THREAD, describe_exit
from hone.rewards.score import Verdict
from hone.rewards.worker import Job, become_subreaper, size_of, ticket_of, work
from hone.types import FailureKind, Observation, Reward, StopReason

__all__ = ["ForkServer", "main", "serve_forked"]

OUT_OF_MEMORY_EXIT = 99
"""Exit code of a worker that ran out of memory and could not even say so."""

MAX_PROCESSES = 256
"""Most processes that one worker may have started and not ended; one with more forks without end,
and would take the machine with it before its deadline."""

_CHECK_DRIVER_S = 2.0
_COUNT_S = 0.5
"""How often the processes of calls that last longer are counted."""
_COUNT_SHARE = 0.05
"""Largest share of the time that counting them may take, on hosts with many processes."""
_SHUT_DOWN_S = 4.0
"""Time to kill everything; only a process stuck in the kernel takes longer than milliseconds."""


@dataclass(slots=True)
class _Worker:
    pid: int
    stream: wire.Stream
    since: float = field(default_factory=time.monotonic)
    """When its present call began, or the import of the functions."""
    is_ready: bool = False
    """It has loaded the functions."""
    request: bytes | None = None
    """The sample that it scores."""
    function: int | None = None
    """Index of the function that it calls; None while it has not begun."""
    is_ending: bool = False
    """It gets no more samples: it ran out of memory, or is being killed."""
    is_overdue: bool = False
    """It is killed for its deadline."""
    num_processes: int = 0
    """Set when it is killed for how many it has started."""
    malformed: str = ""
    """Set when it is killed for what it has sent."""


class ForkServer:
    """Workers and the samples that they score, in one thread that never blocks."""

    def __init__(self, control: socket.socket, job: Job) -> None:
        self.job = job
        self.driver = wire.Stream(control, max_bytes=None)
        self.queue: deque[bytes] = deque()
        self.workers: dict[int, _Worker] = {}  # by process id
        self.has_failed = False
        """The functions cannot be loaded, so no more workers start."""
        self.child_ended, wake = socket.socketpair()
        self.child_ended.setblocking(False)
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the wake-up is all that is wanted
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
        """Kill all workers and all that ever came out of them; return when nothing is left."""
        give_up = time.monotonic() + _SHUT_DOWN_S
        while (left := psutil.Process().children(recursive=True)) and time.monotonic() < give_up:
            for child in left:
                _kill(child)
            self._reap()
            time.sleep(0.001)
        if self.job.scratch is not None:
            remove_tree(Path(self.job.scratch))

    def fail(self, error: str) -> None:
        """Tell the driver why the functions cannot be loaded; it closes when it has read that."""
        if not self.has_failed:
            self.has_failed = True
            self.driver.put(pickle.dumps(("error", error)))

    # ---- samples ---------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Give queued samples to idle workers, and start workers for the rest."""
        for worker in self._idle():
            if self.queue:
                worker.request, worker.function = self.queue.popleft(), None
                worker.since = time.monotonic()
                worker.stream.put(worker.request)
        num_starting = sum(not worker.is_ready for worker in self.workers.values())
        while len(self.workers) < self.job.num_workers and num_starting < len(self.queue):
            if self.has_failed:
                return
            self._fork()
            num_starting += 1

    def _idle(self) -> list[_Worker]:
        return [
            worker
            for worker in self.workers.values()
            if worker.is_ready and worker.request is None and not worker.is_ending
        ]

    def _from_driver(self) -> None:
        self.driver.flush()
        for request in self.driver.take():
            if request:
                self.queue.append(request)
            else:  # the driver gives up on all samples
                self.queue.clear()

    def _from_worker(self, worker: _Worker) -> None:
        worker.stream.flush()
        try:
            for body in worker.stream.take():
                self._read(worker, json.loads(body))
        except (wire.ProtocolError, ValueError, KeyError, TypeError) as error:
            worker.malformed = f"its worker sent something that is not a verdict: {error}"

    def _read(self, worker: _Worker, message: Mapping[str, Any]) -> None:
        if "error" in message:
            self.fail(str(message["error"]))
        elif "signatures" in message:
            worker.is_ready = True
            warnings = list(map(str, message["warnings"]))
            self.driver.put(pickle.dumps(("signatures", message["signatures"], warnings)))
        elif "function" in message:
            worker.function = range(len(self.job.names))[message["function"]]
            worker.since = time.monotonic()
        else:
            if worker.request is None or message["ticket"] != ticket_of(worker.request):
                raise ValueError("a verdict on a sample that it was not scoring")
            verdict = _decode(message)
            if verdict.failure is None and len(verdict.of_group) != size_of(worker.request):
                raise ValueError("a verdict on more or fewer samples than it was scoring")
            self._settle(worker, verdict)

    def _settle(self, worker: _Worker, verdict: Verdict) -> None:
        assert worker.request is not None
        ticket, worker.request = ticket_of(worker.request), None
        worker.is_ending |= verdict.failure is FailureKind.OUT_OF_MEMORY
        self.driver.put(pickle.dumps(("verdict", ticket, verdict, worker.is_overdue)))

    def _watch(self, stream: wire.Stream) -> None:
        """Wake up for what the socket can do next, and for nothing else."""
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
        self.workers[pid] = _Worker(pid, wire.Stream(ours))

    def _kill_overdue(self) -> float:
        """Kill workers past their deadline; seconds until the next one can be due."""
        now = time.monotonic()
        wait = min(_CHECK_DRIVER_S, self.job.timeout_s)
        if self.workers:
            self._kill_forking(now)
            wait = min(wait, max(self.next_count - time.monotonic(), 0.0))
        for worker in self.workers.values():
            if worker.is_ready and worker.request is None:
                continue
            left = worker.since + self._limit_s(worker) - now
            if left > 0:
                wait = min(wait, left)
            elif not worker.is_overdue:
                worker.is_overdue = True
                _kill_worker(worker)
        return wait

    def _kill_forking(self, now: float) -> None:
        """Kill workers that have started too many processes, in calls that are not quick."""
        if now < self.next_count:
            return
        for worker in self.workers.values():
            is_idle = worker.is_ready and worker.request is None
            if not is_idle and now - worker.since > _COUNT_S and not worker.num_processes:
                number = _num_descendants(worker.pid)
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
                self._settle(worker, Verdict(failure=kind, detail=detail, seconds=seconds))
            elif worker.request is not None:
                self.queue.appendleft(worker.request)  # it had not begun with this one
        for child in psutil.Process().children():
            if child.pid not in self.workers:  # what a dead worker left behind is now our child
                _kill(child)

    def _remove_folder(self, worker: _Worker) -> None:
        """What a worker has left of its programs. What cannot be removed yet, since one of them
        goes on for a moment, is when all have ended."""
        if self.job.scratch is not None:
            with contextlib.suppress(OSError):
                remove_tree(_folder_of(self.job.scratch, worker.pid))

    def _reap(self) -> list[tuple[_Worker, int]]:
        """Wait for all children that have ended; the workers among them, with their exit codes."""
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
        return self.job.timeout_s if worker.is_ready else self.job.load_timeout_s


def _decode(message: Mapping[str, Any]) -> Verdict:
    seconds = float(message["seconds"])
    if "failure" in message:
        return Verdict(
            failure=FailureKind(message["failure"]),
            detail=str(message["detail"]),
            is_certain=bool(message["is_certain"]),
            seconds=seconds,
        )
    if "of_group" in message:
        return Verdict(of_group=tuple(map(_decode, message["of_group"])), seconds=seconds)
    if "observation" in message:
        return Verdict(observation=_observation(message["observation"]), seconds=seconds)
    parts = {str(name): float(value) for name, value in message["parts"].items()}
    reason = message["stop_reason"]
    return Verdict(
        reward=Reward(total=float(message["total"]), parts=parts),
        stop_reason=None if reason is None else StopReason(reason),
        seconds=seconds,
    )


def _observation(message: Mapping[str, Any]) -> Observation:
    content, longest = message["content"], message["max_tokens"]
    if not isinstance(content, str):
        content = tuple(dict(one) for one in content)
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


def _num_descendants(pid: int) -> int:
    try:
        return len(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return 0  # it has ended


def _kill(child: psutil.Process) -> None:
    try:
        child.kill()
    except psutil.Error:
        return  # gone already, or it changed its user


def _kill_worker(worker: _Worker) -> None:
    """Kill a worker that has not been waited for, and its process group."""
    worker.is_ending = True
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(worker.pid, signal.SIGKILL)  # it does not lead a group yet


def _be_worker(sock: socket.socket, job: Job) -> NoReturn:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # All that is inherited: the driver's socket, and those of other workers.
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
        os._exit(1)  # whatever escapes: never return into the fork server's loop


def main() -> None:
    """Serve the driver at the other end of the socket whose descriptor is the first argument."""
    control = socket.socket(fileno=int(sys.argv[1]))
    greeting = wire.receive(control)
    if greeting is None:
        return
    _serve(control, pickle.loads(greeting))


def serve_forked(control: socket.socket, job: Job) -> NoReturn:
    """Serve the driver, of which this process is a fork, as a fresh process would."""
    try:  # whatever fails here, no second copy of the driver's program may go on
        _leave_driver(control)
        _serve(control, job)
        os._exit(0)
    finally:
        os._exit(1)


def _leave_driver(control: socket.socket) -> None:
    """Give up what a fork shares with the driver, but for `control`."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    # What the driver has open is its own: locks, sockets, the streams of a notebook.
    os.closerange(3, control.fileno())
    os.closerange(control.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    os.close(null)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    os.environ |= ONE_THREAD
    if "torch" in sys.modules:  # its threads are the driver's
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
