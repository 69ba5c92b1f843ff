"""The driver's side of scoring in worker processes, which can be killed.

driver ──samples──► fork server ──one sample at a time──► worker, worker, ...
   ◄──verdicts──────┘          ◄──verdict────────────────────┘
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, Protocol

from hone.errors import UserError
from hone.observe.disk import temporary_folder
from hone.rewards import wire
from hone.rewards.environment import EnvFacts, EnvSpec
from hone.rewards.jail import remove_tree, warn_of
from hone.rewards.play import EpisodeSoFar
from hone.rewards.program import CALL_TIMEOUT_S
from hone.rewards.score import Verdict
from hone.rewards.settings import RewardConfig
from hone.rewards.worker import CLOSE, NO_SESSION, FunctionSpec, Job, encode_request
from hone.rollout.settings import EnvConfig
from hone.user_code.inherited import inherited

__all__ = ["ONE_THREAD", "WorkerPool", "describe", "describe_exit", "job_of"]

_log = logging.getLogger(__name__)

FORK_SERVER = "hone.rewards.fork_server"
# There is one worker for each core; thread pools in them would only compete for cores.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
LOAD_TIMEOUT_S = 120.0
"""Deadline of importing the user's modules, which may load large libraries from a slow disk."""
_CLOSE_S = 5.0
_SLOW_IMPORT_S = 10.0
"""Time between warnings of an import that takes long."""


def job_of(
    cfg: RewardConfig, names: Sequence[str], env: EnvConfig, *, tool_format: str | None = None
) -> Job:
    """The job of the workers: the functions of `cfg`, with their `names`, and the environment,
    whose calls of tools are read in `tool_format`."""
    specs = [*(entry.fn for entry in cfg.functions), env.path or "", *env.tools]
    return Job(
        env=_spec_of(env, tool_format) if env.is_set else None,
        functions=tuple(
            FunctionSpec(
                name=name,
                spec=entry.fn,
                weight=entry.weight,
                args=dict(entry.args),
                whole_groups=entry.whole_groups,
            )
            for name, entry in zip(names, cfg.functions, strict=True)
        ),
        timeout_s=cfg.timeout_s,
        load_timeout_s=LOAD_TIMEOUT_S,
        memory_limit_bytes=int(cfg.memory_limit_gib * 2**30),
        driver_pid=os.getpid(),
        import_path=tuple(sys.path),
        num_workers=cfg.worker_limit,
        inherits=any(inherited(spec) is not None for spec in specs),
        may_abstain=cfg.model.path is not None,
    )


def _spec_of(env: EnvConfig, tool_format: str | None) -> EnvSpec:
    return EnvSpec(
        path=env.path,
        args=dict(env.args),
        tools=env.tools,
        tool_format=tool_format,
        max_tool_calls=env.max_tool_calls,
        max_parallel_calls=env.max_parallel_calls,
        timeout_s=env.turn_timeout_s if env.harness.command is None else CALL_TIMEOUT_S,
        max_sessions=env.concurrency,
        command=env.harness.command,
    )


def describe(cfg: RewardConfig, env: EnvConfig) -> EnvFacts:
    """What the environment of a run is: it is loaded in a worker, and ended. Raises ValueError
    where it cannot be loaded."""
    pool = WorkerPool(job_of(cfg.model_copy(update={"functions": ()}), (), env))
    with closing(pool):
        assert pool.env is not None
        return pool.env


class WorkerPool:
    """Scores samples in killable processes.

    The first worker starts at once; others start when there are samples for them. Raises ValueError
    where the first worker cannot load the functions; for later ones `poll` raises it.
    """

    def __init__(self, job: Job) -> None:
        self.num_kills = 0
        """Workers killed at a deadline."""
        self.signatures: list[dict[str, Any]] | None = None
        """For each function: the `columns` of the data that it needs, and the `framework` in whose
        shape it is called. None until the first worker has loaded the functions."""
        self.env: EnvFacts | None = None
        """What the environment is; None without one."""
        self._scratch = None
        runs_command = job.env is not None and job.env.command is not None
        if runs_command or any(function.spec == "code_tests" for function in job.functions):
            self._scratch = str(temporary_folder("hone-code-"))
            os.chmod(self._scratch, 0o711)  # programs may run as another user, who must enter it
        self._job = job = replace(job, scratch=self._scratch)
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
                        "importing %s has taken %.0f s; after %g s it fails",
                        job.described,
                        seconds,
                        job.load_timeout_s,
                    )
        except BaseException:
            self.close()
            raise

    def submit(
        self,
        ticket: int,
        given: dict[str, Any] | list[dict[str, Any]],
        episode: EpisodeSoFar | None = None,
        *,
        session: int = 0,
        kind: int = NO_SESSION,
    ) -> None:
        """Queue a sample to be scored from `given` (see `score.arguments`); with an environment,
        `episode` is its input, and with sessions it goes to the worker of `session`. A list of
        `given` is scored in one call."""
        assert ticket not in self._pending, f"{ticket=}"
        self._pending.add(ticket)
        self._stream.put(encode_request(ticket, given, episode, session=session, kind=kind))

    def close_session(self, session: int) -> None:
        """Close a session, after the call that it is in."""
        self._stream.put(encode_request(-1, [], None, session=session, kind=CLOSE))

    def poll(
        self, timeout_s: float, *, wake: socket.socket | None = None
    ) -> list[tuple[int, Verdict]]:
        """Tickets and verdicts since the last poll; waits at most `timeout_s` for the first, or
        until `wake` has something to read."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._receive()
            left = deadline - time.monotonic()
            if self._verdicts or not self._pending or left <= 0:
                verdicts, self._verdicts = self._verdicts, []
                return verdicts
            if self._wait(left, wake):
                deadline = 0.0

    def forget(self, ticket: int) -> None:
        """Drop one sample, whose worker finishes its call."""
        self._pending.discard(ticket)
        self._verdicts = [found for found in self._verdicts if found[0] != ticket]

    def cancel(self) -> None:
        """Drop all samples: `poll` returns no verdicts on them. Workers finish what they score."""
        self._pending.clear()
        self._verdicts.clear()
        self._stream.put(b"")

    def close(self) -> None:
        """Kill all workers and all of their descendants; return when they are gone."""
        self._stream.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._scratch is not None:
            remove_tree(Path(self._scratch))

    def _wait(self, timeout_s: float, wake: socket.socket | None = None) -> bool:
        """Wait for a message, or for room to send one; whether `wake` has something to read."""
        sock = self._stream.sock
        reading = [sock] if wake is None else [sock, wake]
        ready, _, _ = select.select(
            reading, [sock] if self._stream.has_outgoing else [], [], timeout_s
        )
        return wake in ready

    def _receive(self) -> None:
        """Process the fork server's messages. Raises ValueError where a worker cannot load the
        functions, and UserError where the fork server has ended."""
        self._stream.flush()
        for body in self._stream.take():
            kind, *rest = pickle.loads(body)
            if kind == "error":
                raise ValueError(*rest)
            if kind == "signatures":
                self.signatures, missing, self.env = rest
                if missing:
                    warn_of(tuple(missing))
                continue
            ticket, verdict, is_killed = rest
            self.num_kills += is_killed
            if ticket in self._pending:  # else it was cancelled
                self._pending.remove(ticket)
                self._verdicts.append((ticket, verdict))
        if self._stream.ended:
            how = self._how_it_ended()
            raise UserError(
                f"the parent process of the reward workers ended ({how}). Either the code of "
                f"{self._job.described} has ended it, as os.killpg and os.getppid "
                "allow: it may end processes that it has started alone; or the kernel has, for "
                "want of memory."
            )

    def _how_it_ended(self) -> str:
        """How the fork server has ended; its connection is closed."""
        try:
            return describe_exit(self._process.wait(_CLOSE_S))
        except subprocess.TimeoutExpired:  # user code has closed the connection, or it hangs
            self._process.kill()
            self._process.wait()
            return "its connection was closed, and it has been killed"


class _Process(Protocol):
    """The common interface of `subprocess.Popen` and `_Fork`."""

    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class _Fork:
    """A fork of this process, which runs a function."""

    def __init__(self, run: Callable[[], NoReturn]) -> None:
        with warnings.catch_warnings():
            # Python warns that other threads may hold locks at the fork. The fork takes none of
            # these locks: it only runs the reward functions and what they call.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            run()

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        while True:
            try:
                pid, status = os.waitpid(self._pid, os.WNOHANG)
            except ChildProcessError:  # other code of this process has reaped it
                return 0
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(FORK_SERVER, timeout or 0.0)
            time.sleep(0.005)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)


def _start_fork_server(job: Job) -> tuple[_Process, wire.Stream]:
    ours, theirs = socket.socketpair()
    with theirs:
        if job.inherits:
            serve_forked = import_module(FORK_SERVER).serve_forked
            fork = _Fork(lambda: serve_forked(theirs, job))
            return fork, wire.Stream(ours, max_bytes=job.max_result_bytes)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", FORK_SERVER, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ | ONE_THREAD,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    wire.send(ours, pickle.dumps(job))
    return process, wire.Stream(ours, max_bytes=job.max_result_bytes)


def describe_exit(status: int) -> str:
    """A description of how a process ended."""
    if status >= 0:
        return f"exit code {status}"
    name = signal.Signals(-status).name
    hint = ", perhaps by the kernel for want of memory" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"
