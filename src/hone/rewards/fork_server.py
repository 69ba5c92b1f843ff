"""The parent of all workers of one pool: forks them, kills them at their deadline, and leaves no
process behind.

It is a small process of its own, started fresh (so the driver may hold threads and a GPU) and
running no code but this (so it may fork). It imports math-verify once, so a new worker costs
milliseconds. It keeps deadlines also while the driver is busy elsewhere, adopts what workers leave
behind, and when the driver disappears, however it does, it kills everything and ends.

    driver ──control──► fork server ──fork──► worker, worker, ...
       └───────── one socket a worker: samples in, verdicts out ──────────┘
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
import struct
import sys
import time
from dataclasses import dataclass
from typing import NoReturn

import psutil

from hone.config.errors import UserError
from hone.rewards import wire
from hone.rewards.builtin import warm_up_math
from hone.rewards.worker import LOADING, Job, Progress, become_subreaper, work

__all__ = ["COMMAND", "FORK", "KILL", "MAX_PROCESSES", "OUT_OF_MEMORY_EXIT", "main"]

COMMAND = struct.Struct("<cq")
"""One command of the driver: what, and the worker's number."""
FORK = b"f"
"""Fork a worker; its socket comes along as a file descriptor."""
KILL = b"k"
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
    number: int
    pid: int
    progress: Progress
    overdue_ticket: int | None = None
    """Set when it is killed for its deadline."""
    num_processes: int = 0
    """Set when it is killed for how many it has started."""


class ForkServer:
    def __init__(self, control: socket.socket, job: Job) -> None:
        self.control = control
        self.job = job
        self.workers: dict[int, _Worker] = {}  # by process id
        self.child_ended, wake = socket.socketpair()
        self.child_ended.setblocking(False)
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the wake-up is all that is wanted
        self.wake = wake
        self.next_count = 0.0
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ)
        self.selector.register(self.child_ended, selectors.EVENT_READ)

    def run(self) -> None:
        while os.getppid() == self.job.driver_pid:
            ready = {key.fileobj for key, _ in self.selector.select(self._kill_overdue())}
            if self.child_ended in ready:
                self.child_ended.recv(1 << 12)
                self._bury_dead()
            if self.control in ready and not self._obey():
                return

    def shut_down(self) -> None:
        """Kill all workers and all that ever came out of them; return when nothing is left."""
        give_up = time.monotonic() + _SHUT_DOWN_S
        while (left := psutil.Process().children(recursive=True)) and time.monotonic() < give_up:
            for child in left:
                _kill(child)
            self._reap()
            time.sleep(0.001)

    def _obey(self) -> bool:
        """Carry out one command; False when the driver has closed the connection."""
        try:
            command, fds, _, _ = socket.recv_fds(self.control, COMMAND.size, 1)
            command += b"" if not command else self._rest(len(command))
        except ConnectionError:
            return False
        if len(command) < COMMAND.size:
            return False
        what, number = COMMAND.unpack(command)
        if what == FORK:
            self._fork(number, socket.socket(fileno=fds[0]))
        else:
            for worker in self.workers.values():
                if worker.number == number:
                    _kill_worker(worker)
        return True

    def _rest(self, num_received: int) -> bytes:
        missing = COMMAND.size - num_received
        return self.control.recv(missing, socket.MSG_WAITALL) if missing else b""

    def _fork(self, number: int, sock: socket.socket) -> None:
        progress = Progress()
        # Started here, so that a child that dies before its first line is not taken for idle.
        progress.begin(ticket=-1, function=LOADING)
        pid = os.fork()
        if pid == 0:
            _be_worker(self, sock, progress)
        sock.close()
        self.workers[pid] = _Worker(number=number, pid=pid, progress=progress)

    def _kill_overdue(self) -> float:
        """Kill workers past their deadline; seconds until the next one can be due.

        Any worker may start a new call right after this look at it, but then has its whole time
        before it.
        """
        now, job = time.monotonic(), self.job
        wait = min(_CHECK_DRIVER_S, job.timeout_s)
        if self.workers:
            self._kill_forking(now)
            wait = min(wait, max(self.next_count - time.monotonic(), 0.0))
        for worker in self.workers.values():
            call = worker.progress.read()
            limit = job.load_timeout_s if call.function == LOADING else job.timeout_s
            left = call.start + limit - now if call.start else job.timeout_s
            if left > 0:
                wait = min(wait, left)
            elif worker.overdue_ticket is None:
                worker.overdue_ticket = call.ticket
                _kill_worker(worker)
        return wait

    def _kill_forking(self, now: float) -> None:
        """Kill workers that have started too many processes, in calls that are not quick."""
        if now < self.next_count:
            return
        for worker in self.workers.values():
            call = worker.progress.read()
            if call.start and now - call.start > _COUNT_S and not worker.num_processes:
                number = _num_descendants(worker.pid)
                if number > MAX_PROCESSES:
                    worker.num_processes = number
                    _kill_worker(worker)
        taken_s = time.monotonic() - now
        self.next_count = now + max(_COUNT_S, taken_s / _COUNT_SHARE)

    def _bury_dead(self) -> None:
        for worker, status in self._reap():
            with contextlib.suppress(OSError):
                os.killpg(worker.pid, signal.SIGKILL)  # where no orphans are adopted (macOS)
            call = worker.progress.read()
            worker.progress.close()
            # It may have gone on to the next sample in the moment before the kill: that one is
            # innocent, and scored again.
            unlucky = worker.overdue_ticket is not None and worker.overdue_ticket != call.ticket
            report = {
                "worker": worker.number,
                "status": status,
                "overdue": worker.overdue_ticket is not None,
                "processes": worker.num_processes,
                "ticket": call.ticket if call.start and not unlucky else None,
                "function": call.function,
                "seconds": max(0.0, time.monotonic() - call.start) if call.start else 0.0,
            }
            wire.send(self.control, json.dumps(report).encode())
        for child in psutil.Process().children():
            if child.pid not in self.workers:  # what a dead worker left behind is now our child
                _kill(child)

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
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(worker.pid, signal.SIGKILL)  # it does not lead a group yet


def _be_worker(fork_server: ForkServer, sock: socket.socket, progress: Progress) -> NoReturn:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    fork_server.selector.close()
    for inherited in (fork_server.control, fork_server.child_ended, fork_server.wake):
        inherited.close()
    try:
        work(sock, fork_server.job, progress)
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
    job: Job = pickle.loads(greeting)
    become_subreaper()
    try:
        if any(function.spec == "math" for function in job.functions):
            warm_up_math()
    except UserError as error:
        wire.send(control, json.dumps({"error": str(error)}).encode())
        while control.recv(1 << 12):  # the driver closes once it has read this
            pass
        return
    gc.freeze()  # forks then share these pages
    fork_server = ForkServer(control, job)
    try:
        fork_server.run()
    except ConnectionError:
        pass  # the driver is gone
    finally:
        fork_server.shut_down()


if __name__ == "__main__":
    main()
