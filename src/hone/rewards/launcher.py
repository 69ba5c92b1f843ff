"""The process that starts programs which a model wrote, each in a sandboxed fork of itself.

    python -I launcher SOCKET FOLDER [REFUSED...]

It starts with an empty environment and reads only which roles to start, and each fork happens
before it reads any tests. So a program finds no secrets and no expected values in its memory, its
environment or its frames. A role gets its text and its streams as descriptors:

    trial   does nothing, behind the walls: an empty text
    script  runs a program whole: its text, what it reads, what it writes
    serve   runs a program, then answers what it is asked (`peer.py`): its text, the link
    judge   runs tests, which ask a program (`verdicts.py`): the tests, the link, where verdicts go
    calls   compares values of a function of a program: the calls, the link, where verdicts go
"""

from __future__ import annotations

import atexit
import bisect
import builtins
import collections
import copy
import datetime
import fcntl
import fractions
import functools
import gc
import heapq
import io
import itertools
import json
import math
import operator
import os
import random
import re
import select
import signal
import socket
import statistics
import string
import sys
import threading
import time
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn

from hone.rewards.peer import Link, Peer
from hone.rewards.verdicts import judge, judge_calls, own_names
from hone.rewards.walls import SharedFolder, Walls, enter, raise_walls

__all__ = ["END", "STOP", "main"]

END = "end"
"""Message to a launcher to kill all that it has started, and its answer when that is gone. A shared
folder is then empty."""
STOP = "stop"
"""The same, but a shared folder keeps its files."""


_ENDS: dict[str, Callable[[SharedFolder], None]] = {END: SharedFolder.remove, STOP: lambda _: None}


def main() -> None:
    """Serve a jail at the other end of the socket whose descriptor is the first argument."""
    control = socket.socket(fileno=int(sys.argv[1]))
    folder, refused = sys.argv[2], sys.argv[3:]
    os.chdir("/")
    walls = raise_walls(folder, refused)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    hello = {"ready": os.geteuid(), "missing": walls.missing, "tmpfs": walls.tmpfs}
    _tell(control, hello)
    gc.freeze()  # forks then share these pages
    role = _launch(control, walls)  # returns only in a fork
    role()


def _launch(control: socket.socket, walls: Walls) -> Callable[[], NoReturn]:
    """Start the requested roles. Returns only in each fork, with the function to run there."""
    ended, wake = socket.socketpair()
    ended.setblocking(False)
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    started: set[int] = set()
    shared = SharedFolder(walls)
    while True:
        ready, _, _ = select.select([control, ended], [], [])
        if ended in ready:
            ended.recv(1 << 12)
            for pid, status in _reap():
                started.discard(pid)
                _tell(control, {"ended": pid, "status": status})
        if control not in ready:
            continue
        body, handles, _, _ = socket.recv_fds(control, 1 << 12, 4)
        if not body:
            _kill_all(walls, started)
            os._exit(0)
        message = json.loads(body)
        if message in (END, STOP):
            _kill_all(walls, started)
            started.clear()
            _ENDS[message](shared)
            _tell(control, message)
            continue
        if message["shared"]:
            shared.open(message["folder"])
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for sock in (control, ended, wake):
                sock.detach()  # else its finalizer would close a later descriptor of this number
            for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                signal.signal(number, handler)
            return _role(message, handles, walls)
        for handle in handles:
            os.close(handle)
        started.add(pid)
        _tell(control, {"started": pid})


def _reap() -> list[tuple[int, int]]:
    """Ended children and adopted orphans, with their exit codes."""
    ended: list[tuple[int, int]] = []
    with suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((child[0], os.waitstatus_to_exitcode(child[1])))
    return ended


def _kill_all(walls: Walls, started: Iterable[int]) -> None:
    """Kill all descendants of this process, and wait until they are gone."""
    with suppress(ChildProcessError):
        while True:
            if walls.namespaces:
                with suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)  # all in this PID namespace except this process
            else:
                for child in _children() or started:
                    with suppress(ProcessLookupError):
                        os.killpg(child, signal.SIGKILL)
                    with suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
            os.waitpid(-1, 0)  # orphans of killed processes are children of this process now


def _children() -> list[int]:
    """Children of this process and adopted orphans, from the kernel; empty where it has no list."""
    with (
        suppress(FileNotFoundError),
        open(f"/proc/self/task/{os.getpid()}/children") as file,
    ):
        return [int(pid) for pid in file.read().split()]
    return []


def _tell(control: socket.socket, message: Any) -> None:
    control.sendall(json.dumps(message).encode() + b"\n")


# ---- in a fork -----------------------------------------------------------------------------------


def _role(message: Mapping[str, Any], handles: list[int], walls: Walls) -> Callable[[], NoReturn]:
    """Enter the sandbox, close foreign descriptors, and return the function that the fork runs."""
    name: str = message["role"]
    text, *streams = handles
    null = os.open(os.devnull, os.O_RDWR)
    ours = [*streams, null] if name == "script" else [null, null, null, *streams]
    moved = [fcntl.fcntl(handle, fcntl.F_DUPFD, 16) for handle in (text, *ours)]
    for number, handle in enumerate(moved[1:]):
        os.dup2(handle, number)
    with os.fdopen(moved[0], encoding="utf-8") as file:
        content = file.read()
    os.closerange(len(ours), os.sysconf("SC_OPEN_MAX"))
    enter(walls, message["folder"], is_shared=message["shared"])
    sys.argv = ["program.py"]
    if name == "trial":
        return functools.partial(os._exit, 0)
    if name == "script":
        return functools.partial(_run_script, content)
    link = Link(socket.socket(fileno=3))
    if name == "serve":
        return functools.partial(_serve_program, content, link)
    return functools.partial({"judge": judge, "calls": judge_calls}[name], content, link, 4)


def _exported(module: ModuleType) -> Iterable[tuple[str, Any]]:
    """The names and values that `from module import *` imports."""
    public = [name for name in vars(module) if not name.startswith("_")]
    return ((name, getattr(module, name)) for name in getattr(module, "__all__", public))


_IMPORTED = (
    *(string, re, datetime, collections, heapq, bisect, copy, math, random, statistics),
    *(itertools, functools, operator, io, sys, json, typing, fractions, time),
)
_BUILT_INS: dict[str, Any] = {
    **{name: value for module in _IMPORTED for name, value in _exported(module)},
    **{module.__name__: module for module in _IMPORTED},
    **vars(builtins),
}
"""Names that a program has without an import. They include those that the graders of data sets
import, since solutions in LeetCode's form use `List`, `deque` or `bisect_left` without importing
them. They are built-ins, not globals of the program: otherwise an empty program would pass where
tests ask for one of these names.

Source: `lcb_runner/evaluation/testing_util.py` of LiveCodeBench and `eval/testing_util.py` of APPS,
whose lists these are together.
"""
_MAX_RECURSION = 50_000
"""Recursion limit, as in LiveCodeBench's grader: a search of depth 10,000 is common."""


def _module(name: str) -> dict[str, Any]:
    """The global names of a new module for a program."""
    module = sys.modules[name] = ModuleType(name)
    vars(module)["__builtins__"] = _BUILT_INS
    sys.setrecursionlimit(_MAX_RECURSION)
    return vars(module)


def _run_script(program: str) -> NoReturn:
    """Run a program to its end like Python, but without freeing its objects at exit: in a fork that
    took four times as long as everything else."""
    names = _module("__main__")
    status = 0
    try:
        exec(compile(program, "program.py", "exec", dont_inherit=True), names)
    except SystemExit as error:
        code = error.code
        status = code & 0xFF if isinstance(code, int) else int(code is not None)
    except BaseException:  # noqa: BLE001 - a program may raise anything
        status = 1
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    try:
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        sys.stdout.flush()
    finally:
        os._exit(status)


def _serve_program(program: str, link: Link) -> NoReturn:
    """Run a program, report whether it loaded, and serve calls of its functions."""
    peer = Peer(link, is_judge=False)
    peer.names = _module("program")
    try:
        exec(compile(program, "program.py", "exec", dont_inherit=True), peer.names)
    except BaseException:  # noqa: BLE001 - a program may raise anything
        link.send({"loaded": False})
        os._exit(1)
    peer.own = own_names(dict(peer.names))
    link.send({"loaded": True})
    try:
        peer.serve()
    finally:
        os._exit(0)
