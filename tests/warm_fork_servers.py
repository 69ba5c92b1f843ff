"""Fork servers of rewards that start at once: copies of one process that has imported them.

A fresh one takes half a second to import what it needs, as long as all else that a tiny run does.
`Starter` starts this file, fresh as a fork server is and without a thread, which then makes a copy
of itself for each pool. The copy is the driver's own child, as `CLONE_PARENT` of Linux allows: a
fork server ends with its parent. A test that changes the environment gets a fresh process.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import socket
import subprocess
import sys
import traceback
from typing import Any

CLONE_PARENT = 0x8000
SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
IS_SERVED = sys.platform == "linux" and SYS_CLONE is not None


class Starter:
    """Stands for `hone.rewards.pool._start_fork_server`, which is `fresh`."""

    def __init__(self, pool: Any) -> None:
        self._pool, self._fresh = pool, pool._start_fork_server
        self._module = pool.FORK_SERVER
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._environment = _environment()

    def __call__(self, job: Any) -> tuple[Any, Any]:
        is_usual = (self._module, self._environment) == (self._pool.FORK_SERVER, _environment())
        if job.inherits or not IS_SERVED or not is_usual:
            return self._fresh(job)
        wire, pickle = self._pool.wire, self._pool.pickle
        ours, theirs = socket.socketpair()
        with theirs:
            pid = self._copy(theirs)
        wire.send(ours, pickle.dumps(job))
        copy = object.__new__(self._pool._Fork)  # what is known of one: it is there already
        copy.pid = copy._pid = pid
        return copy, wire.Stream(ours, max_bytes=job.max_result_bytes)

    def _copy(self, control: socket.socket) -> int:
        if self._control is None:
            self._control, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", __file__, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env=os.environ | self._pool.ONE_THREAD,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
        cwd = os.fsencode(os.getcwd())
        socket.send_fds(self._control, [cwd], [control.fileno(), sys.__stderr__.fileno()])
        return int(self._control.recv(32))

    def close(self) -> None:
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.wait()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def serve(control: socket.socket) -> None:
    """Make a copy of this process for each socket that comes, until the tests have ended."""
    from hone.rewards import fork_server

    libc = ctypes.PyDLL(None)
    while True:
        cwd, fds, _, _ = socket.recv_fds(control, 4096, 2)
        if not fds:
            return
        pid = libc.syscall(SYS_CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            control.close()
            os.setsid()
            os.chdir(cwd)
            os.dup2(fds[1], 2)
            os.close(fds[1])
            sys.argv[1:] = [str(fds[0])]
            try:
                fork_server.main()
                os._exit(0)
            except BaseException:  # noqa: BLE001  a copy must not go on as this process
                traceback.print_exc()
            finally:
                os._exit(1)
        for fd in fds:
            os.close(fd)
        control.send(str(pid).encode())


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
