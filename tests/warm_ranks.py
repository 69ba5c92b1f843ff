"""Launches of `tests.ranks` that begin with torch and transformers imported.

To import them takes longer than most ranks work. The first launch starts this file, which imports
them without starting a thread and then makes a copy of itself for each launch, until the tests have
ended. A copy is the child of the process that runs the tests, as `CLONE_PARENT` of Linux allows:
its end is waited for there, and its CPU time is counted there.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, NoReturn

from tests.warm_fork_servers import CLONE_PARENT, IS_SERVED, SYS_CLONE

ROOT = Path(__file__).parents[1]
IMPORTED = (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"),
    *("transformers.models.auto.auto_factory", "transformers.modeling_utils"),
    *("pydantic", "pytest", "rich"),
)
"""What most modules of ranks import, of other packages: a name of hone here would make every test
of ranks one of that module, for what chooses tests by what they import."""


def launch(arguments: list[str], timeout_s: float, *, is_warm: bool = True) -> tuple[int, str, str]:
    """Run `python -m tests.ranks` with arguments, and return its status and what it has written to
    stdout and stderr. It is killed after `timeout_s`, and is a fresh process unless `is_warm`."""
    with TemporaryFile() as printed, TemporaryFile() as errors, ThreadPoolExecutor(1) as pool:
        start = _copy if is_warm and IS_SERVED else _fresh
        pid = start(arguments, printed, errors)
        ended = pool.submit(os.waitpid, pid, 0)
        try:
            ended.result(timeout_s)
        except TimeoutError:
            errors.write(f"It has not ended within {timeout_s} s.\n".encode())
        finally:
            if not ended.done():
                _kill(pid)
        status = os.waitstatus_to_exitcode(ended.result()[1])
        printed.seek(0)
        errors.seek(0)
        return status, printed.read().decode(), errors.read().decode(errors="replace")


def _kill(pid: int) -> None:
    """Kill a launch and its ranks. One that has hardly begun has no group yet, and no rank."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def _fresh(arguments: list[str], printed: IO[bytes], errors: IO[bytes]) -> int:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.ranks", *arguments],
        cwd=ROOT,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=printed,
        stderr=errors,
        start_new_session=True,
    )
    process.returncode = 0  # `launch` waits for it
    return process.pid


def _copy(arguments: list[str], printed: IO[bytes], errors: IO[bytes]) -> int:
    with TemporaryFile() as request:
        request.write(json.dumps([arguments, _environment()]).encode())
        request.seek(0)
        control = _server(os.getpid())
        socket.send_fds(control, [b"."], [file.fileno() for file in (request, printed, errors)])
        pid = int(control.recv(32) or -1)
    if pid < 0:
        raise RuntimeError("the process that starts ranks has ended, or may start no other")
    return pid


@cache
def _server(_: int) -> socket.socket:
    """What a server takes launches from; one for each process that runs tests."""
    control, theirs = socket.socketpair()
    with theirs:
        subprocess.Popen(
            [sys.executable, "-m", "tests.warm_ranks", str(theirs.fileno())],
            cwd=ROOT,
            env=_environment(),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    return control


def serve(control: socket.socket) -> None:
    """Make a copy of this process for each launch."""
    for module in IMPORTED:
        __import__(module)
    libc = ctypes.PyDLL(None)
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 3)
        if not message:
            return
        pid = libc.syscall(SYS_CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            control.close()
            _run(*fds)
        for fd in fds:
            os.close(fd)
        control.send(str(pid).encode())


def _run(request: int, printed: int, errors: int) -> NoReturn:
    """The launch of a copy, which must not go on as this process."""
    status = 1
    try:
        os.setsid()
        os.dup2(printed, 1)
        os.dup2(errors, 2)
        with open(request, encoding="utf-8") as file:
            arguments, environment = json.load(file)
        os.environ.clear()
        os.environ.update(environment)
        from tests import ranks

        status = ranks._main(int(arguments[0]), *arguments[1:])
    except BaseException:  # noqa: BLE001  it is reported where the launch was asked for
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # to take all of torch down takes seconds
