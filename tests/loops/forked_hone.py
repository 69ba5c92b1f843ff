"""`hone` in copies of one process that has imported what a run needs, each in a session of its own.

Every line of standard input is a list in JSON: a file for what the copy prints, and its arguments.
The answers are the copy's process id and, once it has ended, its exit status.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from select import select


class Copy:
    """A `hone` that runs, with as much of the interface of Popen as tests need."""

    def __init__(self, parent: subprocess.Popen[bytes], log: Path, arguments: list[str]) -> None:
        assert parent.stdin is not None
        assert parent.stdout is not None
        self._answers = parent.stdout
        self._log = log
        parent.stdin.write(json.dumps([str(log), *arguments]).encode() + b"\n")
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self._wait(0.0)
        return self.returncode

    def communicate(self, timeout: float = 600.0) -> tuple[bytes, None]:
        if not self._wait(timeout):
            raise subprocess.TimeoutExpired("hone", timeout)
        return self._log.read_bytes(), None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self.poll() is None:
            self.send_signal(signal.SIGKILL)
            self.communicate()

    def _wait(self, seconds: float) -> bool:
        """Whether it has ended within so many seconds."""
        if self.returncode is None and select([self._answers], [], [], seconds)[0]:
            self.returncode = int(self._answers.readline())
        return self.returncode is not None


@contextmanager
def parent_of_copies() -> Generator[subprocess.Popen[bytes]]:
    """The process that is copied."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.loops.forked_hone"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,  # `select` sees no line that is in a buffer
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as parent:
        try:
            yield parent
        finally:
            parent.kill()


def _serve() -> None:
    from hone.cli.main import main
    from hone.loops import reinforce  # noqa: F401  what is imported here is so in every copy

    for line in sys.stdin:
        log, *arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            _send_output_to(log)
            sys.exit(main(arguments))
        _answer(pid)
        _answer(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _answer(number: int) -> None:
    os.write(1, b"%d\n" % number)


def _send_output_to(log: str) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)


if __name__ == "__main__":
    _serve()
