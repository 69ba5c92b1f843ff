"""What runs inside a worker process: load the functions, then score samples until the driver is
gone. The process may loop, crash or be killed at any moment; `fork_server.py` handles that.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

from hone.address import names_code
from hone.rewards import wire
from hone.rewards.builtin import build
from hone.rewards.jail import launchers
from hone.rewards.play import EpisodeSoFar, Player, play
from hone.rewards.resolve import check_signature, resolve
from hone.rewards.score import ENV_NAME, RewardFunction, Verdict, score, score_group
from hone.types import FailureKind

__all__ = [
    "EnvSpec",
    "FunctionSpec",
    "Job",
    "become_subreaper",
    "encode_request",
    "load",
    "size_of",
    "ticket_of",
    "work",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSpec:
    """One entry of `reward.functions` under its unique name."""

    name: str
    spec: str
    weight: float
    args: dict[str, Any]
    whole_groups: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """The environment of `env`."""

    path: str
    args: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every worker of a pool gets."""

    functions: tuple[FunctionSpec, ...]
    env: EnvSpec | None = None
    timeout_s: float
    """Deadline of one call."""
    load_timeout_s: float
    """Deadline of importing all functions."""
    memory_limit_bytes: int
    """Address space of one process, beside what it inherits."""
    driver_pid: int
    import_path: tuple[str, ...]
    """`sys.path` of the driver."""
    num_workers: int
    inherits: bool = False
    """Some functions are the driver's own, so that the fork server is a fork of the driver."""
    scratch: str | None = None
    """Where workers have a folder each for what programs write; None where none runs programs."""
    may_abstain: bool = False
    """As of `hone.rewards.score.score`."""

    @property
    def names(self) -> tuple[str, ...]:
        """What may be called, by the index that a worker tells of it."""
        return (*(function.name for function in self.functions), *([ENV_NAME] * bool(self.env)))

    @property
    def described(self) -> str:
        """What is imported, for messages."""
        parts = [f"env.path ({self.env.path})"] if self.env is not None else []
        if self.functions:
            specs = ", ".join(function.spec for function in self.functions)
            parts.append(f"reward.functions ({specs})")
        return " and ".join(parts)


def work(sock: socket.socket, job: Job, folder: Path | None) -> NoReturn:
    """Score what arrives on `sock` for the rest of this process's life. What programs of
    completions write is in `folder`."""
    taken = psutil.Process().memory_info().vms if job.inherits else 0
    _isolate(job.memory_limit_bytes + taken)
    pid = os.getpid()

    def send(message: Mapping[str, Any]) -> None:
        if os.getpid() != pid:
            os._exit(0)  # a child that the user's code forked has returned from it
        wire.send(sock, json.dumps(message).encode())

    def tell(index: int) -> None:
        send({"function": index})

    try:
        env, functions, signatures, warnings = load(job, folder)
    except ValueError as error:
        send({"error": str(error)[: wire.MAX_RESULT_BYTES // 8]})
        os._exit(0)
    send({"signatures": signatures, "warnings": warnings})
    helpers = {child.pid for child in psutil.Process().children(recursive=True)}
    while (request := wire.receive(sock)) is not None:
        ticket = ticket_of(request)
        send({"function": len(functions) if env is not None else 0})
        given, episode = pickle.loads(memoryview(request)[_HEADER.size :])
        if isinstance(given, list):
            verdict = score_group(functions, given, on_call=tell)
        elif env is not None:
            verdict = play(env, functions, given, episode, on_call=tell)
        else:
            verdict = score(functions, given, on_call=tell, may_abstain=job.may_abstain)
        if os.getpid() == pid:
            _kill_children(keep=helpers)
        send(_plain(ticket, verdict))
        if verdict.failure is FailureKind.OUT_OF_MEMORY:
            break  # what filled the memory may still be referenced
    os._exit(0)


def load(
    job: Job, folder: Path | None
) -> tuple[Player | None, list[RewardFunction], list[dict[str, Any]], list[str]]:
    """Environment and functions of a job, ready to be called; of each function the `columns` of
    the data that it needs and the `framework` in whose shape it is called; and what the user is to
    be warned of.

    Raises ValueError for the first bad one.
    """
    known = set(sys.path)
    sys.path += [entry for entry in (*job.import_path, os.getcwd()) if entry not in known]
    functions: list[RewardFunction] = []
    signatures: list[dict[str, Any]] = []
    warnings: list[str] = []
    for spec in job.functions:
        if names_code(spec.spec):
            function, args = resolve(spec.spec), spec.args
        else:
            function, args = build(spec.spec, spec.args), {}
            function.limit_time(job.timeout_s)
            warnings += function.settle(folder)
        signatures.append(
            check_signature(function, spec.spec, args, whole_groups=spec.whole_groups)
        )
        functions.append(
            RewardFunction(
                function,
                name=spec.name,
                weight=spec.weight,
                args=args,
                whole_groups=spec.whole_groups,
            )
        )
    env = Player(job.env.path, job.env.args) if job.env is not None else None
    return env, functions, signatures, warnings


_HEADER = struct.Struct("<qq")
"""The ticket, and how many samples are scored together; 0: one by itself."""


def encode_request(
    ticket: int, given: dict[str, Any] | list[dict[str, Any]], episode: EpisodeSoFar | None
) -> bytes:
    """The message that asks a worker to score one sample, or to answer its last turn; or to score
    a list of them together."""
    request = pickle.dumps((given, episode), protocol=pickle.HIGHEST_PROTOCOL)
    num = len(given) if isinstance(given, list) else 0
    return _HEADER.pack(ticket, num) + request


def ticket_of(request: bytes) -> int:
    """The ticket of an encoded request."""
    return _HEADER.unpack_from(request)[0]


def size_of(request: bytes) -> int:
    """How many samples an encoded request asks to score together; 0: one by itself."""
    return _HEADER.unpack_from(request)[1]


def _plain(ticket: int, verdict: Verdict) -> dict[str, Any]:
    """A verdict for JSON, of which no more is sent than is accepted."""
    plain: dict[str, Any] = {"ticket": ticket, "seconds": verdict.seconds}
    if verdict.failure is not None:
        return plain | {
            "failure": verdict.failure,
            "detail": verdict.detail,
            "is_certain": verdict.is_certain,
        }
    if verdict.observation is not None:
        plain["observation"] = asdict(verdict.observation)
    elif verdict.of_group:
        plain["of_group"] = [_plain(ticket, one) for one in verdict.of_group]
    else:
        assert verdict.reward is not None, f"{verdict=}"
        plain |= {
            "total": verdict.reward.total,
            "parts": dict(verdict.reward.parts),
            "stop_reason": verdict.stop_reason,
        }
    num_bytes = len(json.dumps(plain))
    if num_bytes <= wire.MAX_RESULT_BYTES:
        return plain
    detail = f"the result takes {num_bytes} bytes, at most {wire.MAX_RESULT_BYTES} are allowed"
    too_large = Verdict(failure=FailureKind.INVALID, detail=detail, seconds=verdict.seconds)
    return _plain(ticket, too_large)


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


def _has_children_but(known: set[int]) -> bool:
    """Whether this process has others, as the kernel lists them: far sooner than by the parents of
    all processes. True where it does not list them."""
    found: set[int] = set()
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children") as file:
                found.update(map(int, file.read().split()))
    except FileNotFoundError:
        return True
    return not found <= known


def _kill_children(*, keep: set[int]) -> None:
    """Kill every process the last call left behind; `keep` started while loading."""
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return  # the usual case, at the cost of one system call
        if not _has_children_but(keep | launchers):
            return
        left = [
            one
            for child in psutil.Process().children()
            if child.pid not in launchers  # which end what they have started
            for one in (child, *child.children(recursive=True))
            if one.pid not in keep
        ]
        if not left:
            return
        for child in left:
            try:
                child.kill()
            except psutil.Error:
                continue  # gone already
        time.sleep(0.001)
