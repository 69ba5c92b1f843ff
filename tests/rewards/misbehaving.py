"""A reward function that does to its process what its completion says."""

import asyncio
import ctypes
import os
import re
import subprocess
import sys
import time

HOARD = []
WAITS_FOR = "wait for "
"""Begins a completion whose call ends when the file that it names is there."""


def score(completion, **_):
    if completion.startswith(WAITS_FOR):
        return _wait_for(completion.removeprefix(WAITS_FOR))
    action = ACTIONS.get(completion)
    return 1.0 if action is None else action()


async def asynchronous(completion):
    await asyncio.sleep(1000 if completion == "hang" else 0)
    return float(completion == "good")


def _catastrophic_regex():
    return re.match(r"(a+)+$", "a" * 60 + "b")


def _hoard():
    # Zeroed pages come untouched: a busy machine would else need the whole time limit to fill them.
    while True:
        HOARD.append(bytes(1 << 24))


def _fork(then, *, detach=False):
    def action():
        if os.fork() == 0:
            if detach:
                os.setsid()
                if os.fork():
                    os._exit(0)
            time.sleep(1000)
            os._exit(0)
        return then()

    return action


def _print_for_ever():
    while True:
        print("x" * (1 << 16))  # noqa: T201


def _print_below_python():
    while True:
        os.write(1, b"x" * (1 << 16))
        os.write(2, b"x" * (1 << 16))


def _raise():
    raise KeyError("no such column")


def _write_garbage():
    for fd in range(3, 64):
        try:
            os.write(fd, b"\xff" * 16)
        except OSError:
            continue
    return 1.0


def _fork_and_return_twice():
    return 1.0 if os.fork() else 0.25


def _wait_for(file):
    while not os.path.exists(file):
        time.sleep(0.01)
    return 1.0


def _one():
    return 1.0


def _sleep():
    time.sleep(1000)


def _nap():
    time.sleep(2)
    return 1.0


HANGING = {
    "loop in C": lambda: sum(range(10**15)),
    "regex": _catastrophic_regex,
    "sleep": _sleep,
    "nap": _nap,
    "fork and hang": _fork(_sleep),
    "daemon and hang": _fork(_sleep, detach=True),
    "subprocess": lambda: subprocess.run(["sleep", "1000"], check=False),
    "subprocess session": lambda: subprocess.run(
        ["sleep", "1000"], check=False, start_new_session=True
    ),
    "print": _print_for_ever,
    "write": _print_below_python,
}
GREEDY = {"allocate": lambda: bytearray(100 << 30), "hoard": _hoard}
RESERVE = {"reserve": lambda: float(len(bytes(6 << 30)) > 0)}
CRASHING = {
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "exit": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getpid(), 9),
    "garbage": _write_garbage,
    "close": lambda: os.closerange(3, 64),
    "fork and segfault": _fork(lambda: ctypes.string_at(0), detach=True),
}
RAISING = {"raise": _raise, "sys.exit": lambda: sys.exit(1), "recursion": lambda: _deeper(0)}
INVALID = {
    "nan": lambda: float("nan"),
    "inf": lambda: {"score": float("-inf")},
    "text": lambda: "1.0",
    "none": lambda: None,
    "bad metric": lambda: {"score": 1.0, "why": "because"},
    "no score": lambda: {"value": 1.0},
    "too much": lambda: {"score": 1.0} | {f"{i:0100}": i for i in range(11_000)},
    "huge": lambda: 10**400,
}
LEAVING = {
    "fork": _fork(_one),
    "daemon": _fork(_one, detach=True),
    "background": lambda: float(
        subprocess.Popen(["sleep", "1000"], start_new_session=True).pid > 0
    ),
    "return twice": _fork_and_return_twice,
}
ACTIONS = HANGING | GREEDY | RESERVE | CRASHING | RAISING | INVALID | LEAVING


def _deeper(depth):
    return _deeper(depth + 1)
