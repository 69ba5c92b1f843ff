"""The code of a worker process: it loads the functions, then scores samples until the driver is
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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil

from hone.address import names_code
from hone.rewards import wire
from hone.rewards.builtin import build
from hone.rewards.environment import EnvFacts, EnvSpec
from hone.rewards.jail import launchers
from hone.rewards.play import EpisodeSoFar, Player, play
from hone.rewards.process_tree import children_of
from hone.rewards.said import num_image_bytes
from hone.rewards.score import ENV_NAME, RewardFunction, Verdict, score, score_group
from hone.rewards.session_player import SessionPlayer
from hone.types import FailureKind
from hone.user_code.resolve import check_signature, resolve

__all__ = [
    "CLOSE",
    "NO_SESSION",
    "START",
    "STEP",
    "FunctionSpec",
    "Job",
    "become_subreaper",
    "encode_request",
    "load",
    "outlive_signals",
    "session_of",
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
class Job:
    """The configuration of all workers of a pool."""

    functions: tuple[FunctionSpec, ...]
    env: EnvSpec | None = None
    timeout_s: float
    """Deadline of one call."""
    load_timeout_s: float
    """Deadline of importing all functions."""
    memory_limit_bytes: int
    """Address space of one process, on top of what it inherits."""
    driver_pid: int
    import_path: tuple[str, ...]
    """`sys.path` of the driver."""
    num_workers: int
    inherits: bool = False
    """Some functions are objects of the driver, so the fork server is a fork of the driver."""
    scratch: str | None = None
    """Folder with a folder of each worker, for files of programs; None where no programs run. The
    folder of a worker is removed when it ends, also where it is killed."""
    may_abstain: bool = False
    """The argument `may_abstain` of `hone.rewards.score.score`."""

    @property
    def max_result_bytes(self) -> int:
        """Largest message accepted from a worker."""
        return wire.MAX_RESULT_BYTES + (wire.MAX_IMAGE_BYTES if self.env is not None else 0)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of functions and environment, by the index that a worker reports."""
        return (*(function.name for function in self.functions), *([ENV_NAME] * bool(self.env)))

    @property
    def described(self) -> str:
        """The configuration keys with what they import, for messages."""
        parts = [self.env.described] if self.env is not None else []
        if self.functions:
            specs = ", ".join(function.spec for function in self.functions)
            parts.append(f"reward.functions ({specs})")
        return " and ".join(parts)


def work(sock: socket.socket, job: Job, folder: Path | None) -> NoReturn:
    """Score the requests that arrive on `sock` until this process ends. Programs in completions
    write to `folder`."""
    inherited_bytes = psutil.Process().memory_info().vms if job.inherits else 0
    _isolate(job.memory_limit_bytes + inherited_bytes)
    pid = os.getpid()

    def send(message: Mapping[str, Any]) -> None:
        if os.getpid() != pid:
            os._exit(0)  # this is a child that the user's code forked, and it has returned here
        wire.send(sock, json.dumps(message).encode())

    try:
        loaded, functions, signatures, warnings = load(job, folder)
    except ValueError as error:
        send({"error": str(error)[: wire.MAX_RESULT_BYTES // 8]})
        os._exit(0)
    env, facts = (None, None) if loaded is None else loaded
    described = None if facts is None else asdict(facts)
    send({"signatures": signatures, "warnings": warnings, "env": described})
    helpers = {child.pid for child in psutil.Process().children(recursive=True)}
    server = _Server(job, env, functions, send, helpers, pid)
    while (request := wire.receive(sock)) is not None and server.serve(request):
        pass
    os._exit(0)


@dataclass(frozen=True, slots=True)
class _Server:
    """Serves the requests of one worker."""

    job: Job
    env: Player | SessionPlayer | None
    functions: list[RewardFunction]
    send: Callable[[Mapping[str, Any]], None]
    helpers: set[int]
    """Processes that loading the functions has started, which live as long as the worker."""
    pid: int
    """The worker's process, of which the user's code may have made a fork that returns here."""

    def serve(self, request: bytes) -> bool:
        """Answer a request; whether the worker can serve more."""
        _, asked = session_of(request)
        if asked == CLOSE:
            self._close_session()
            return True
        ticket = ticket_of(request)
        self._report_call(len(self.functions) if self.env is not None else 0)
        given, episode = pickle.loads(memoryview(request)[_HEADER.size :])
        verdict = self._verdict(given, episode)
        # A session may have started processes that it needs, also to close.
        if asked == NO_SESSION and os.getpid() == self.pid:
            _kill_children(keep=self.helpers)
        plain = _plain(ticket, verdict)
        self.send(plain)
        if asked != NO_SESSION and "observation" not in plain:
            self._close_session()
        # The objects that filled the memory may still be referenced.
        return verdict.failure is not FailureKind.OUT_OF_MEMORY

    def _verdict(self, given: Any, episode: Any) -> Verdict:
        functions, report = self.functions, self._report_call
        if isinstance(given, list):
            return score_group(functions, given, on_call=report)
        if self.env is not None:
            return play(
                self.env,
                functions,
                given,
                episode,
                on_call=report,
                may_abstain=self.job.may_abstain,
            )
        return score(functions, given, on_call=report, may_abstain=self.job.may_abstain)

    def _close_session(self) -> None:
        assert isinstance(self.env, SessionPlayer)
        self._report_call(len(self.functions))
        self.env.close()
        _kill_children(keep=self.helpers)
        self.send({"closed": True})

    def _report_call(self, index: int) -> None:
        self.send({"function": index})


def load(
    job: Job, folder: Path | None
) -> tuple[
    tuple[Player | SessionPlayer, EnvFacts] | None,
    list[RewardFunction],
    list[dict[str, Any]],
    list[str],
]:
    """The environment of a job with what it is; the functions; the signature of each function (the
    `columns` of the data that it needs, and the `framework` in whose shape it is called); and
    warnings for the user.

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
    loaded = None
    if job.env is not None:
        # With the shapes and tools that it imports, only where there is an environment.
        from hone.rewards.load_environment import load_environment

        loaded = load_environment(job.env, folder)
    return loaded, functions, signatures, warnings


NO_SESSION, START, STEP, CLOSE = range(4)
"""What a request asks of the session that it names: nothing, since it names none; to be made; to
answer; to be closed, which has no verdict."""

_HEADER = struct.Struct("<qqqb")
"""The ticket; the number of samples to score in one call, 0 for a single sample; the session; and
what is asked of it."""


def encode_request(
    ticket: int,
    given: dict[str, Any] | list[dict[str, Any]],
    episode: EpisodeSoFar | None,
    *,
    session: int = 0,
    kind: int = NO_SESSION,
) -> bytes:
    """A request to score one sample or answer its last turn, or to score a list in one call."""
    request = pickle.dumps((given, episode), protocol=pickle.HIGHEST_PROTOCOL)
    num = len(given) if isinstance(given, list) else 0
    return _HEADER.pack(ticket, num, session, kind) + request


def session_of(request: bytes) -> tuple[int, int]:
    """The session of an encoded request, and what is asked of it."""
    _, _, session, kind = _HEADER.unpack_from(request)
    return session, kind


def ticket_of(request: bytes) -> int:
    """The ticket of an encoded request."""
    return _HEADER.unpack_from(request)[0]


def size_of(request: bytes) -> int:
    """The number of samples to score in one call in an encoded request; 0 for a single sample."""
    return _HEADER.unpack_from(request)[1]


def _plain(ticket: int, verdict: Verdict) -> dict[str, Any]:
    """A verdict as a JSON value; a failure in its place where it exceeds `MAX_RESULT_BYTES`."""
    plain: dict[str, Any] = {"ticket": ticket, "seconds": verdict.seconds}
    if verdict.failure is not None:
        return plain | {
            "failure": verdict.failure,
            "detail": verdict.detail,
            "is_certain": verdict.is_certain,
            "is_session_lost": verdict.is_session_lost,
        }
    if verdict.observation is not None:
        plain["observation"] = asdict(verdict.observation)
    elif verdict.of_group:
        plain["of_group"] = [_plain(ticket, of_sample) for of_sample in verdict.of_group]
    else:
        assert verdict.reward is not None, f"{verdict=}"
        plain |= {
            "total": verdict.reward.total,
            "parts": dict(verdict.reward.parts),
            "is_partial": verdict.reward.is_partial,
            "stop_reason": verdict.stop_reason,
        }
    num_bytes = len(json.dumps(plain))
    # Those of images, which have no character that JSON would escape, have a bound of their own.
    if verdict.observation is not None:
        num_bytes -= num_image_bytes(verdict.observation.content)
    if num_bytes <= wire.MAX_RESULT_BYTES:
        return plain
    detail = f"the result takes {num_bytes} bytes, at most {wire.MAX_RESULT_BYTES} are allowed"
    too_large = Verdict(failure=FailureKind.INVALID, detail=detail, seconds=verdict.seconds)
    return _plain(ticket, too_large)


def _isolate(memory_limit_bytes: int) -> None:
    """Give this process its own process group, no output, no core files, a memory limit, and death
    with the fork server."""
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


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def outlive_signals() -> None:
    """Let this process go on after signals that ask a run to end, until the driver ends it.

    Some schedulers send SIGTERM to every process of a run, and the driver then finishes its step,
    which needs rewards. Programs that this process starts, and its forks, end as usual.
    """
    _let_forks_end()
    for number in _ENDING:
        signal.signal(number, _go_on)  # not SIG_IGN, which programs would inherit


def _go_on(number: int, frame: FrameType | None) -> None:
    pass


@cache
def _let_forks_end() -> None:
    """Give forks the default handlers. Meanwhile signals wait, since Python forgets one that comes
    to a fork before it runs."""

    def reset() -> None:
        for number in _ENDING:
            signal.signal(number, signal.SIG_DFL)
        unblock()

    def block() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=reset)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def _has_children_but(known: set[int]) -> bool:
    """Whether this process has children other than `known`; true where that is not known."""
    children = children_of(os.getpid())
    return children is None or not children <= known


def _kill_children(*, keep: set[int]) -> None:
    """Kill every process that the last call left running, except `keep`, which loading started."""
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return  # the usual case, which takes one system call
        if not _has_children_but(keep | launchers):
            return
        left = [
            process
            for child in psutil.Process().children()
            if child.pid not in launchers  # a launcher ends its own children
            for process in (child, *child.children(recursive=True))
            if process.pid not in keep
        ]
        if not left:
            return
        for child in left:
            try:
                child.kill()
            except psutil.Error:
                continue  # it has ended
        time.sleep(0.001)
