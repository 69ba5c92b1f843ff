"""What runs inside a worker process: load the functions, then score samples until the driver is
gone. The process may loop, crash or be killed at any moment; `fork_server.py` handles that.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass
from typing import Any, NoReturn

import psutil

from hone.rewards import wire
from hone.rewards.builtin import build
from hone.rewards.resolve import check_signature, resolve
from hone.rewards.score import RewardFunction, Verdict, score
from hone.types import FailureKind

__all__ = [
    "LOADING",
    "NO_TICKET",
    "Call",
    "FunctionSpec",
    "Job",
    "Progress",
    "encode_request",
    "load",
    "work",
]

LOADING = -1
"""Function index while the functions are being loaded."""
NO_TICKET = -1
"""Ticket while no sample is in work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSpec:
    """One entry of `reward.functions` under its unique name."""

    name: str
    spec: str
    weight: float
    args: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every worker of a pool gets."""

    functions: tuple[FunctionSpec, ...]
    timeout_s: float
    """Deadline of one call."""
    load_timeout_s: float
    """Deadline of importing all functions."""
    memory_limit_bytes: int
    """Address space of one process."""
    driver_pid: int
    import_path: tuple[str, ...]
    """`sys.path` of the driver."""


@dataclass(frozen=True, slots=True)
class Call:
    """The call a worker is in: since when, for which sample, to which function."""

    start: float
    """By `time.monotonic`, which all processes of a machine share; 0 while idle, infinite while the
    verdict is being sent."""
    ticket: int
    function: int


class Progress:
    """Shared memory in which a worker notes the call it is in, for the fork server to read."""

    _LAYOUT = struct.Struct("<dqq")
    _START = struct.Struct("<d")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self._LAYOUT.size)  # anonymous: shared over a fork

    def begin(self, *, ticket: int, function: int) -> None:
        # The start goes to 0 first and is written last: a reader never pairs an old start with a
        # new ticket.
        self.end()
        self._LAYOUT.pack_into(self._memory, 0, 0.0, ticket, function)
        self._START.pack_into(self._memory, 0, time.monotonic())

    def deliver(self) -> None:
        """Still in work, but without a deadline: the driver may be slow to read the verdict."""
        self._START.pack_into(self._memory, 0, math.inf)

    def end(self) -> None:
        self._START.pack_into(self._memory, 0, 0.0)

    def read(self) -> Call:
        return Call(*self._LAYOUT.unpack_from(self._memory, 0))

    def close(self) -> None:
        self._memory.close()


def work(sock: socket.socket, job: Job, progress: Progress) -> NoReturn:
    """Score what arrives on `sock` for the rest of this process's life."""
    progress.begin(ticket=NO_TICKET, function=LOADING)
    _isolate(job.memory_limit_bytes)
    pid = os.getpid()
    try:
        functions, columns = load(job)
    except ValueError as error:
        wire.send(sock, json.dumps({"error": str(error)[: wire.MAX_RESULT_BYTES // 8]}).encode())
        os._exit(0)
    if os.getpid() != pid:
        os._exit(0)  # a child that a module forked has returned from the import
    helpers = {child.pid for child in psutil.Process().children(recursive=True)}
    progress.end()
    wire.send(sock, json.dumps({"ready": True, "columns": columns}).encode())
    while (request := wire.receive(sock)) is not None:
        (ticket,) = _TICKET.unpack_from(request)
        progress.begin(ticket=ticket, function=0)
        given = pickle.loads(memoryview(request)[_TICKET.size :])
        verdict = score(
            functions,
            given,
            on_call=lambda index, ticket=ticket: progress.begin(ticket=ticket, function=index),
        )
        if os.getpid() != pid:
            os._exit(0)  # a child that the function forked has returned from it
        _kill_children(keep=helpers)
        body = _encode(ticket, verdict)
        progress.deliver()
        wire.send(sock, body)
        progress.end()
        if verdict.failure is FailureKind.OUT_OF_MEMORY:
            break  # what filled the memory may still be referenced
    os._exit(0)


def load(job: Job) -> tuple[list[RewardFunction], list[list[str]]]:
    """All functions of a job, ready to be called, and the columns of the data that each needs.

    Raises ValueError for the first bad one.
    """
    known = set(sys.path)
    sys.path += [entry for entry in (*job.import_path, os.getcwd()) if entry not in known]
    functions: list[RewardFunction] = []
    columns: list[list[str]] = []
    for spec in job.functions:
        needed: list[str] = []
        if ":" not in spec.spec:
            function, args = build(spec.spec, spec.args), {}
        else:
            function, args = resolve(spec.spec), spec.args
            needed = check_signature(function, spec.spec, args)
        functions.append(RewardFunction(function, name=spec.name, weight=spec.weight, args=args))
        columns.append(needed)
    return functions, columns


_TICKET = struct.Struct("<q")


def encode_request(ticket: int, given: dict[str, Any]) -> bytes:
    """The message that asks a worker to score one sample."""
    return _TICKET.pack(ticket) + pickle.dumps(given, protocol=pickle.HIGHEST_PROTOCOL)


def _encode(ticket: int, verdict: Verdict) -> bytes:
    body = json.dumps(_plain(ticket, verdict)).encode()
    if len(body) <= wire.MAX_RESULT_BYTES:
        return body
    detail = f"the result takes {len(body)} bytes, at most {wire.MAX_RESULT_BYTES} are allowed"
    too_large = Verdict(failure=FailureKind.INVALID, detail=detail, seconds=verdict.seconds)
    return json.dumps(_plain(ticket, too_large)).encode()


def _plain(ticket: int, verdict: Verdict) -> dict[str, Any]:
    plain: dict[str, Any] = {"ticket": ticket, "seconds": verdict.seconds}
    if verdict.reward is not None:
        return plain | {"total": verdict.reward.total, "parts": dict(verdict.reward.parts)}
    return (
        plain
        | {"failure": verdict.failure, "detail": verdict.detail}
        | {"is_certain": verdict.is_certain}
    )


def _isolate(memory_limit_bytes: int) -> None:
    """Own process group, no output, no core files, bounded memory, death with the fork server."""
    os.setsid()
    become_subreaper()
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # macOS refuses to limit the address space
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = memory_limit_bytes if hard < 0 else min(memory_limit_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Adopt orphaned descendants, so that none of them can leave the process tree (Linux)."""
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def _kill_children(*, keep: set[int]) -> None:
    """Kill every process the last call left behind; `keep` started while loading."""
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return  # the usual case, at the cost of one system call
        left = [c for c in psutil.Process().children(recursive=True) if c.pid not in keep]
        if not left:
            return
        for child in left:
            try:
                child.kill()
            except psutil.Error:
                continue  # gone already
        time.sleep(0.001)
