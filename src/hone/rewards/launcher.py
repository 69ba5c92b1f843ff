"""The process that starts programs which a model wrote, each as a copy of itself behind walls.

    python -I launcher SOCKET FOLDER [REFUSED...]

It is started with an empty environment, reads nothing but which roles to start, and each copy is
made before the tests are read by anybody in it: so nothing that a program finds in its memory, its
environment or its frames is worth finding. A role gets its text and its streams as descriptors:

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
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn

from hone.rewards.peer import Link, Peer
from hone.rewards.verdicts import judge, judge_calls, own_names
from hone.rewards.walls import Walls, enter, raise_walls

__all__ = ["END", "main"]

END = "end"
"""What a launcher is sent to kill all that it has started, and says when that is gone."""


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
    gc.freeze()  # copies then share these pages
    role = _launch(control, walls)  # comes back in a copy alone
    role()


def _launch(control: socket.socket, walls: Walls) -> Callable[[], NoReturn]:
    """Start what is asked for. Returns in each copy, with what it does."""
    ended, wake = socket.socketpair()
    ended.setblocking(False)
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    started: set[int] = set()
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
        if message == END:
            _kill_all(walls, started)
            started.clear()
            _tell(control, END)
            continue
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for sock in (control, ended, wake):
                sock.detach()  # else what has its number later would be closed with it
            for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                signal.signal(number, handler)
            return _role(message["role"], handles, walls, message["folder"])
        for handle in handles:
            os.close(handle)
        started.add(pid)
        _tell(control, {"started": pid})


def _reap() -> list[tuple[int, int]]:
    """Children that have ended, with their exit codes; orphans of them too."""
    found: list[tuple[int, int]] = []
    with suppress(ChildProcessError):
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            found.append((one[0], os.waitstatus_to_exitcode(one[1])))
    return found


def _kill_all(walls: Walls, started: Iterable[int]) -> None:
    """Kill all that has come out of this process, and wait until it is gone."""
    with suppress(ChildProcessError):
        while True:
            if walls.namespaces:
                with suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)  # all of this process table but its first process
            else:
                for child in _children() or started:
                    with suppress(ProcessLookupError):
                        os.killpg(child, signal.SIGKILL)
                    with suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
            os.waitpid(-1, 0)  # an orphan of what has been killed is a child now


def _children() -> list[int]:
    """As the kernel lists them, orphans of children too; none where it does not."""
    with (
        suppress(FileNotFoundError),
        open(f"/proc/self/task/{os.getpid()}/children") as file,
    ):
        return [int(pid) for pid in file.read().split()]
    return []


def _tell(control: socket.socket, message: Any) -> None:
    control.sendall(json.dumps(message).encode() + b"\n")


# ---- in a copy -----------------------------------------------------------------------------------


def _role(name: str, handles: list[int], walls: Walls, folder: str) -> Callable[[], NoReturn]:
    """What the copy does, behind all walls, with its own descriptors alone."""
    text, *streams = handles
    null = os.open(os.devnull, os.O_RDWR)
    ours = [*streams, null] if name == "script" else [null, null, null, *streams]
    moved = [fcntl.fcntl(handle, fcntl.F_DUPFD, 16) for handle in (text, *ours)]
    for number, handle in enumerate(moved[1:]):
        os.dup2(handle, number)
    with os.fdopen(moved[0], encoding="utf-8") as file:
        found = file.read()
    os.closerange(len(ours), os.sysconf("SC_OPEN_MAX"))
    enter(walls, folder)
    sys.argv = ["program.py"]
    if name == "trial":
        return functools.partial(os._exit, 0)
    if name == "script":
        return functools.partial(_run_script, found)
    link = Link(socket.socket(fileno=3))
    if name == "serve":
        return functools.partial(_serve_program, found, link)
    return functools.partial({"judge": judge, "calls": judge_calls}[name], found, link, 4)


def _exported(module: ModuleType) -> Iterable[tuple[str, Any]]:
    """What `from module import *` gives."""
    public = [name for name in vars(module) if not name.startswith("_")]
    return ((name, getattr(module, name)) for name in getattr(module, "__all__", public))


_IMPORTED = (
    *(string, re, datetime, collections, heapq, bisect, copy, math, random, statistics),
    *(itertools, functools, operator, io, sys, json, typing, fractions, time),
)
_BUILT_INS: dict[str, Any] = {
    **{name: one for module in _IMPORTED for name, one in _exported(module)},
    **{module.__name__: module for module in _IMPORTED},
    **vars(builtins),
}
"""What a program has without an import: also the names that the graders of data sets import before
it, since solutions in the form of LeetCode's use `List`, `deque` or `bisect_left` so. They are no
names of the program, which would pass with nothing where tests ask for one of them.

Source: `lcb_runner/evaluation/testing_util.py` of LiveCodeBench and `eval/testing_util.py` of APPS,
whose lists these are together.
"""
_MAX_RECURSION = 50_000
"""Calls within each other, as LiveCodeBench's grader allows: a search of depth 10,000 is common."""


def _module(name: str) -> dict[str, Any]:
    """The global names of a new module for a program."""
    module = sys.modules[name] = ModuleType(name)
    vars(module)["__builtins__"] = _BUILT_INS
    sys.setrecursionlimit(_MAX_RECURSION)
    return vars(module)


def _run_script(program: str) -> NoReturn:
    """Run a program to its end, as Python would, but for freeing its memory piece by piece: of a
    copy that takes four times as long as all else."""
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
    """Run a program, say whether that has worked, and answer what is asked of it."""
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
