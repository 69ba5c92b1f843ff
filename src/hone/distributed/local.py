"""Workers as processes of this host, each with its own GPUs.

    with local_workers(plan, "module:build", num_processes=1) as workers:
        worker = workers.start("engine", 0, gpus=["0"])

`python -m hone.distributed.local` is one rank of a worker. It reads its specification and the key
of its line from standard input, which only the parent process can write. It ends when the parent
ends, however that happens.
"""

from __future__ import annotations

import logging
import os
import pickle
import secrets
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from time import sleep
from traceback import print_exc
from typing import Any, NamedTuple

from hone.distributed.calls import Hub
from hone.distributed.listening import LOOPBACK, host_store, on_loopback
from hone.distributed.spawn import process_defaults
from hone.distributed.worker_rank import STARTING_S, WorkerRank, WorkerSpec, rank_environment

__all__ = ["LocalWorker", "LocalWorkers", "local_workers"]

_log = logging.getLogger(__name__)

_KEPT_LINES = 20
"""Last output lines of a process that are quoted when it is gone."""
_OUTPUT_S = 1.0
"""Longest wait for the rest of the output of a process that has ended: a child of it may hold the
pipe open."""
_SETTLE_S = 1.0
"""Time that the first rank has to notice that another one is gone. Its own error says more."""
_LOOK_S = 0.5
"""Interval in which a rank checks whether its parent is alive."""


class _Start(NamedTuple):
    """Message to a new process through its standard input."""

    parent: int
    """Process id of the parent."""
    address: tuple[str, int]
    """Address of the parent's hub."""
    line: bytes
    """Key of the process's line."""
    spec: WorkerSpec
    rank: int


class LocalWorker:
    """A `Worker` whose ranks are processes of this host. Each has its own line; the first one
    answers the calls."""

    def __init__(
        self,
        spec: WorkerSpec,
        hub: Hub,
        *,
        environment: Mapping[str, str],
        gpus: Sequence[str],
        shows_output: bool,
    ) -> None:
        """`gpus` are the GPUs of all ranks, empty on a CPU. With `shows_output` the first rank's
        output appears on this process's standard error."""
        self.name, self.role = spec.name, spec.role
        self._shows_output = shows_output
        self._lines = [hub.line(spec.name) for _ in range(spec.size)]
        self._made = [line.call("wait_until_made") for line in self._lines]
        for rank, made in enumerate(self._made[1:], start=1):
            made.add_done_callback(partial(self._end_unless_made, rank))
        self._store, meeting = None, (LOOPBACK, 0)
        if spec.size > 1:
            self._store = host_store(LOOPBACK, timeout_s=STARTING_S)
            meeting = LOOPBACK, self._store.port
        key, self._processes = secrets.token_hex(32), list[subprocess.Popen[bytes]]()
        for rank, line in enumerate(self._lines):
            own = rank_environment(rank, spec.size, meeting, key, gpus)
            process = subprocess.Popen(
                [sys.executable, "-m", "hone.distributed.local"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**environment, **own},
                start_new_session=True,  # only this process gets the terminal's Ctrl-C
            )
            self._processes.append(process)
            watch = threading.Thread(target=self._watch, args=(rank, process), daemon=True)
            watch.start()
            assert process.stdin is not None
            # It may have ended already; the watching thread says why.
            with suppress(BrokenPipeError), process.stdin as stdin:
                pickle.dump(_Start(os.getpid(), hub.address, line.key, spec, rank), stdin)

    @property
    def num_ranks(self) -> int:
        return len(self._processes)

    def wait_until_made(self, timeout_s: float) -> None:
        """Wait until all ranks are built. Raises the error of a rank that could not be built,
        TimeoutError, and EngineLostError if a rank is gone, for which the others would wait long.
        """
        done, late = wait(self._made, timeout_s, FIRST_EXCEPTION)
        for made in done:
            made.result()
        if late:
            raise TimeoutError(f"{self.name} has not started within {timeout_s:g} s")

    def call(self, method: str, /, *args: Any) -> Future[Any]:
        """Begin a call of a method of the first rank's object."""
        return self._lines[0].call(method, *args)

    def kill(self) -> None:
        """Kill its processes and their children at once."""
        for line in self._lines:
            line.end("it was killed")
        for process in self._processes:
            if process.poll() is None:
                _kill_group(process.pid)
        for process in self._processes:
            process.wait()

    def _end_unless_made(self, rank: int, made: Future[Any]) -> None:
        """End the first rank's line if another rank could not be built: the first one would wait
        for it."""
        if (error := made.exception()) is not None:
            self._lines[0].end(f"its rank {rank} could not be made: {error}")

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Read the output of a process and, once it has ended, end its line with the reason."""
        kept = deque[str](maxlen=_KEPT_LINES)
        reading = threading.Thread(target=self._read, args=(rank, process, kept), daemon=True)
        reading.start()
        code = process.wait()
        _kill_group(process.pid)  # its child processes
        reading.join(_OUTPUT_S)
        if rank > 0:
            self._lines[rank].end("it has ended")
            sleep(_SETTLE_S)
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        verb = "ended with" if code >= 0 else "was killed by"
        process_name = f"its process {process.pid}" if rank == 0 else f"its rank {rank}"
        text = "\n".join(kept).strip()
        self._lines[0].end(f"{process_name} {verb} {how}{f': {text}' if text else ''}")

    def _read(self, rank: int, process: subprocess.Popen[bytes], kept: deque[str]) -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                text = line.decode(errors="replace").rstrip("\n")
                kept.append(text)
                if rank == 0 and self._shows_output:
                    _log.info("%s: %s", self.name, text)


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


@dataclass(slots=True)
class LocalWorkers:
    """Starts workers of one plan on this host, and ends them."""

    plan: Any
    build: str
    """See `WorkerSpec.build`."""
    environment: Mapping[str, str]
    hub: Hub
    _started: list[LocalWorker] = field(default_factory=list[LocalWorker])

    def start(self, role: str, index: int, gpus: Sequence[str], size: int = 1) -> LocalWorker:
        """Begin to start a worker of `size` ranks on these GPUs, empty on a CPU."""
        worker = LocalWorker(
            WorkerSpec(f"{role} {index}", role, size, self.build, self.plan),
            self.hub,
            environment=self.environment,
            gpus=gpus,
            shows_output=index == 0,
        )
        self._started.append(worker)
        return worker

    def close(self) -> None:
        """Kill all workers at once."""
        for worker in self._started:
            worker.kill()


@contextmanager
def local_workers(plan: Any, build: str, *, num_processes: int) -> Generator[LocalWorkers]:
    """Open a starter of workers with `num_processes` processes in total. They end with the
    context."""
    with on_loopback():
        environment = {**process_defaults(num_processes), **os.environ}
    with (
        closing(Hub(LOOPBACK, num_lines=num_processes)) as hub,
        closing(LocalWorkers(plan, build, environment, hub)) as workers,
    ):
        yield workers


def _main() -> None:
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hone").setLevel(logging.INFO)
    start: _Start = pickle.load(sys.stdin.buffer)
    watch = threading.Thread(target=_end_with, args=[start.parent], daemon=True)
    watch.start()
    rank, line = WorkerRank(start.spec, start.rank), (start.address, start.line)
    answering = threading.Thread(target=rank.serve, args=line, daemon=True)
    answering.start()
    try:
        rank.make()
    except Exception as error:  # noqa: BLE001  whoever has started this process asks for it
        _log.debug("not made: %r", error)
    else:
        if rank.rank > 0:
            try:
                rank.follow()
            except Exception:  # noqa: BLE001  whoever has started this process reads it
                print_exc()
                os._exit(1)  # the interpreter's shutdown may wait for ranks that are gone
            os._exit(0)
    answering.join()
    os._exit(0)  # no thread that still runs is needed


def _end_with(parent: int) -> None:
    """End this process and its children once its parent is gone."""
    while os.getppid() == parent:
        sleep(_LOOK_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    _main()
