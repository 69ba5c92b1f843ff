"""Starts the processes of a run on this host, and ends them together.

They get the same environment as from torchrun. The difference is how a run ends: Ctrl-C reaches
each process once, and the process decides what to do. After a second Ctrl-C or a failure all
processes end within seconds, even stopped ones.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING

from hone.distributed.processes import HONE_KEY, HONE_LAUNCHER
from hone.distributed.signals import handling

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["INTERRUPTED", "RESTART", "process_defaults", "spawn"]

INTERRUPTED = 130
"""Exit code after Ctrl-C; in `spawn` also that of a process that saved and ended after any
signal."""
RESTART = 75
"""Exit code of a run that has lowered its memory use and asks to be started again."""
_GRACE_S = 4.0
"""Time that processes have, after a failure or a second Ctrl-C, to learn of it and end by
themselves."""
_REPORT_S = 60.0
"""Time for the process that reports why the run ends, on a machine that all of them load."""
_POLL_S = 0.05


Death = Callable[[str, int, str, Sequence[int]], None]
"""Called when a process died without a report: how it ended, the step, the phase, and the ids of
all processes."""


def spawn(command: Sequence[str], nproc: int, on_death: Death | None = None) -> int:
    """Run `command` in `nproc` processes. Returns the exit code of the run.

    The exit code is 0 after success, 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP, and
    otherwise that of the process that reported why the run ends. If a process was killed, this
    function reports it, calls `on_death` once all processes have ended, and returns 1. Raises
    KeyboardInterrupt if Ctrl-C ended the run and no process was left to report it.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        run, key = _Run(), secrets.token_hex(32)
        try:
            with run.forwarding():
                for rank in range(nproc):
                    process = subprocess.Popen(
                        command,
                        env=_environment(rank, nproc, server.getsockname()[1], key),
                        start_new_session=True,  # processes get Ctrl-C once, from this process
                    )
                    run.processes.append(process)
                # Imported only now, in parallel with the processes: it takes seconds.
                from torch.distributed import TCPStore

                store = TCPStore(
                    "127.0.0.1",
                    server.getsockname()[1],
                    is_master=True,
                    wait_for_workers=False,
                    master_listen_fd=os.dup(server.fileno()),
                )
                return run.watch_over(store)
        finally:
            for process in run.processes:
                _kill(process)
            if run.death is not None and on_death is not None:
                on_death(*run.death, [process.pid for process in run.processes])


def _environment(rank: int, nproc: int, port: int, key: str) -> dict[str, str]:
    own = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": nproc,
        "LOCAL_WORLD_SIZE": nproc,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
        HONE_LAUNCHER: 1,
        HONE_KEY: key,
    }
    return {
        **process_defaults(nproc),
        **os.environ,
        **{name: str(value) for name, value in own.items()},
    }


def process_defaults(num_processes: int) -> dict[str, str]:
    """Default variables of processes that share this host, where the user has not set them."""
    return {
        "OMP_NUM_THREADS": f"{max((os.cpu_count() or 1) // num_processes, 1)}",
        # hone explains broken connections; torch would add a page of C++ frames in each process.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


@dataclass(slots=True)
class _Run:
    """The running processes, by rank, and the signals that the launcher got."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])
    ended_by: int = 0
    """SIGTERM or SIGHUP if one came, else 0."""
    death: tuple[str, int, str] | None = None
    """How a process ended that could not report it, with step and phase."""
    interrupts: list[float] = field(default_factory=list[float])
    """Times of Ctrl-C."""

    @contextmanager
    def forwarding(self) -> Generator[None]:
        """Context manager that forwards Ctrl-C, SIGTERM and SIGHUP to every process, which decides
        when to stop."""

        def forward(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGINT:
                self.interrupts.append(time.monotonic())
            else:
                self.ended_by = number
            for process in self.processes:
                if process.poll() is None:
                    process.send_signal(number)

        with handling(forward, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            yield

    def watch_over(self, store: Store) -> int:
        """Wait until all processes have ended; after a failure or a second Ctrl-C only for a short
        time."""
        from hone.distributed.store import prefixed
        from hone.distributed.watch import claim_for, read_progress

        store = prefixed(store)
        while True:
            codes = [process.poll() for process in self.processes]
            failed = [rank for rank, code in enumerate(codes) if code not in (None, 0, INTERRUPTED)]
            if failed:
                return self._after_failure(min(failed, key=lambda rank: codes[rank] or 0), store)
            if None not in codes:
                if INTERRUPTED not in codes:
                    return 0
                if self.ended_by:
                    return 128 + self.ended_by
                if read_progress(store, 0) is None:
                    raise KeyboardInterrupt
                return INTERRUPTED
            if len(self.interrupts) > 1 and time.monotonic() > self.interrupts[1] + _GRACE_S:
                if claim_for(None, store):
                    raise KeyboardInterrupt
                return INTERRUPTED
            time.sleep(_POLL_S)

    def _after_failure(self, rank: int, store: Store) -> int:
        """Let the other processes end and one of them report why. Returns the exit code of the run.

        `rank` is the process that was seen to end first; killed ones come before others.
        """
        from hone.distributed.watch import claim_for, read_report

        code = self.processes[rank].returncode
        passed_on = {signal.SIGINT} if self.interrupts else set[int]()
        passed_on |= {self.ended_by} if self.ended_by else set[int]()
        # A process with an error has claimed the report before it ended; others end silently.
        is_sudden = -code not in passed_on if code < 0 else not passed_on
        if is_sudden and claim_for(None, store):
            self._report_death(rank, store)
        self._wait(_GRACE_S, self.processes)
        reporter, code_reported = read_report(store)
        if reporter is not None and code_reported is None:
            self._wait(_REPORT_S, [self.processes[reporter]])
            code_reported = read_report(store)[1] or self.processes[reporter].poll()
        if code_reported is not None and code_reported > 0:
            return code_reported
        if self.ended_by:
            return 128 + self.ended_by
        if self.interrupts:
            if claim_for(None, store):
                raise KeyboardInterrupt
            return INTERRUPTED
        return max(code, 1)

    def _report_death(self, rank: int, store: Store) -> None:
        """Report how a process ended that could not do so itself."""
        from hone.distributed.watch import advice, read_progress

        process = self.processes[rank]
        number = -process.returncode if process.returncode < 0 else None
        how = (
            f"was killed by {signal.Signals(number).name}"
            if number
            else f"ended with exit code {process.returncode} (what it wrote, if anything, is above)"
        )
        last = read_progress(store, rank)
        doing = "while it started" if last is None else f"in {last.doing(time.time())}"
        name = f"rank {rank}" if last is None else last.name
        message = f"{name} (pid {process.pid}) {how}, {doing}."
        if number:
            message += f"\n{advice(number)}"
        step, phase = (0, "start") if last is None else (last.step, last.phase)
        self.death = message, step, phase
        sys.stderr.write(f"error: {message}\n")
        sys.stderr.flush()

    def _wait(self, seconds: float, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(p.poll() is None for p in processes):
            time.sleep(_POLL_S)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
