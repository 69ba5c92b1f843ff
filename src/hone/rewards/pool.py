"""The driver's side of scoring in processes that can be killed.

driver ──samples──► fork server ──one sample at a time──► worker, worker, ...
   ◄──verdicts──────┘          ◄──verdict────────────────────┘
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from hone.config.errors import UserError
from hone.config.hardware import num_usable_cores
from hone.rewards import wire
from hone.rewards.score import Verdict
from hone.rewards.worker import Job, encode_request

__all__ = ["Pool", "default_num_workers", "describe_exit"]

_log = logging.getLogger(__name__)

FORK_SERVER = "hone.rewards.fork_server"
_CLOSE_S = 5.0
_SLOW_IMPORT_S = 10.0
"""Time between warnings of an import that takes long."""


class Pool:
    """Scores samples in killable processes. Workers start when there is work for them.

    The first one starts at once. Raises ValueError where it cannot load the functions; `poll` does
    so for later ones.
    """

    def __init__(self, job: Job) -> None:
        self.num_kills = 0
        """Workers killed at a deadline."""
        self.signatures: list[dict[str, Any]] | None = None
        """Of each function the `columns` of the data that it needs and the `framework` in whose
        shape it is called; None until the first worker has loaded them."""
        self._job = job
        self._pending: set[int] = set()  # tickets
        self._verdicts: list[tuple[int, Verdict]] = []
        self._process, self._stream = _start_fork_server(job)
        try:
            started, warned_s = time.monotonic(), 0.0
            while self.signatures is None:
                self._wait(_SLOW_IMPORT_S)
                self._receive()
                if (seconds := time.monotonic() - started) > warned_s + _SLOW_IMPORT_S:
                    warned_s = seconds
                    _log.warning(
                        "importing the reward functions (%s) has taken %.0f s; after %g s it fails",
                        job.specs,
                        seconds,
                        job.load_timeout_s,
                    )
        except BaseException:
            self.close()
            raise

    def submit(self, ticket: int, given: Mapping[str, Any]) -> None:
        """Queue one sample, to be scored from `given` (see `score.arguments`)."""
        assert ticket not in self._pending, f"{ticket=}"
        self._pending.add(ticket)
        self._stream.put(encode_request(ticket, dict(given)))

    def poll(self, timeout_s: float) -> list[tuple[int, Verdict]]:
        """Tickets and verdicts since the last poll; waits at most `timeout_s` for the first."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._receive()
            left = deadline - time.monotonic()
            if self._verdicts or not self._pending or left <= 0:
                verdicts, self._verdicts = self._verdicts, []
                return verdicts
            self._wait(left)

    def cancel(self) -> None:
        """Give up on all samples: no verdict comes of them. What workers hold they still score."""
        self._pending.clear()
        self._verdicts.clear()
        self._stream.put(b"")

    def close(self) -> None:
        """Kill all workers and whatever they started; return when they are gone."""
        self._stream.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait(self, timeout_s: float) -> None:
        sock = self._stream.sock
        select.select([sock], [sock] if self._stream.has_outgoing else [], [], timeout_s)

    def _receive(self) -> None:
        """Take in what the fork server has sent. Raises ValueError where a worker cannot load the
        functions, and UserError where the fork server has ended."""
        self._stream.flush()
        for body in self._stream.take():
            what, *rest = pickle.loads(body)
            if what == "error":
                raise ValueError(*rest)
            if what == "signatures":
                (self.signatures,) = rest
                continue
            ticket, verdict, is_killed = rest
            self.num_kills += is_killed
            if ticket in self._pending:  # else it was cancelled
                self._pending.remove(ticket)
                self._verdicts.append((ticket, verdict))
        if self._stream.ended:
            how = describe_exit(self._process.wait(_CLOSE_S))
            raise UserError(
                f"the parent process of the reward workers ended ({how}). Either a function of "
                f"reward.functions ({self._job.specs}) has ended it, as os.killpg and os.getppid "
                "allow: it may end processes that it has started alone; or the kernel has, for "
                "want of memory."
            )


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


def describe_exit(status: int) -> str:
    """How a process ended, for people."""
    if status >= 0:
        return f"exit code {status}"
    name = signal.Signals(-status).name
    hint = ", perhaps by the kernel for want of memory" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


def default_num_workers() -> int:
    """One worker per CPU core that this process may use, at most 16."""
    return min(num_usable_cores(), 16)
