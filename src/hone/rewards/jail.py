"""Runs programs that a model wrote in sandboxed processes, which a separate process starts.

    jail = Jail()
    with jail.run() as programs:
        pid = programs.start("script", [program, given, written])
        status = programs.wait(pid, deadline)

`launcher.py` is that process, and `walls.py` the sandbox; SECURITY.md says what it contains. The
reward worker, which has keys in its environment and judges the results, never runs a program
itself.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any

from hone.rewards.launcher import END, STOP

__all__ = ["Jail", "JailError", "launchers", "missing_walls", "remove_tree", "warn_of"]

_log = logging.getLogger(__name__)

_START = (
    "import sys; sys.path.insert(0, {root!r}); from hone.rewards import launcher; "
    "del sys.path[0]; launcher.main()"
)
_ROOT = str(Path(__file__).parents[2])
_START_S, _END_S = 60.0, 10.0

launchers: set[int] = set()
"""Process ids of this process's launchers, which stay alive between calls of a reward function."""


class JailError(RuntimeError):
    """The process that starts programs could not be started, or has ended."""


class Jail:
    """A launcher process, started at once, and the folder that its programs may write to.

    The caller removes `folder`; by default the jail makes one and removes it. `refused` are kinds
    of walls to leave out. Raises JailError where the launcher does not start.
    """

    def __init__(self, folder: Path | None = None, refused: Sequence[str] = ()) -> None:
        self._own = None if folder is not None else tempfile.mkdtemp(prefix="hone-code-")
        self._folder = Path(folder or self._own or "")
        self._folder.chmod(0o711)  # programs may run as another user, who must enter the folder
        self._mount = self._folder / "program"
        self._mount.mkdir(mode=0o700, exist_ok=True)
        self._numbers = itertools.count()
        ours, theirs = socket.socketpair()
        self._control = ours
        self._arrived = b""
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-c", _START.format(root=_ROOT)),
                    *(str(theirs.fileno()), str(self._mount), *refused),
                ],
                pass_fds=[theirs.fileno()],
                env={
                    "PATH": os.defpath,
                    "HOME": str(self._mount),
                    "TMPDIR": str(self._mount),
                    "LANG": "C.UTF-8",
                    "OPENBLAS_NUM_THREADS": "1",
                    "OMP_NUM_THREADS": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        launchers.add(self._process.pid)
        hello = self.receive(monotonic() + _START_S)
        self._user: int = hello["ready"]
        self._has_tmpfs: bool = hello["tmpfs"]
        self.missing: Mapping[str, str] = hello["missing"]
        """By name of a missing wall: what programs can do on this machine without it."""

        with tempfile.TemporaryFile() as empty, self.run() as programs:
            pid = programs.start("trial", [empty.fileno()])
            if programs.wait(pid, monotonic() + _START_S) != 0:
                raise JailError(f"no program can be started in {self._folder}")

    @contextmanager
    def run(self, *, shares_files: bool = False) -> Generator[Programs]:
        """Run the programs of one test in the block; at its end they are killed, and their files
        are removed. Each finds an empty folder, or with `shares_files` that of the program before
        it."""
        folder = self._mount
        if not self._has_tmpfs:
            folder = self._folder / f"program-{next(self._numbers)}"
            folder.mkdir(mode=0o700)
            if self._user != os.geteuid():
                os.chown(folder, self._user, self._user)
        try:
            yield Programs(self, str(folder), shares_files=shares_files)
        finally:
            self.end(END)
            if not self._has_tmpfs:
                remove_tree(folder)

    def close(self) -> None:
        """End the launcher and all that it has started."""
        self._control.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        launchers.discard(self._process.pid)
        if self._own is not None:
            remove_tree(Path(self._own))

    def end(self, how: str) -> None:
        """Kill all programs; `how` is `END` or `STOP`."""
        self.send(how)
        deadline = monotonic() + _END_S
        try:
            while self.receive(deadline) != how:
                pass
        except TimeoutError:  # a later answer would be taken for that of the next test
            self.close()
            raise self._lost("it cannot end what it has started") from None

    def send(self, message: Any, handles: Sequence[int] = ()) -> None:
        """Send the launcher a message and descriptors. Raises JailError where it is lost."""
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], handles)
        except OSError as error:
            raise self._lost(str(error)) from None

    def receive(self, deadline: float) -> Any:
        """The launcher's next message. Raises TimeoutError at the deadline, JailError where it is
        lost."""
        while b"\n" not in self._arrived:
            if (left_s := deadline - monotonic()) <= 0.0:  # also under a flood of ended orphans
                raise TimeoutError
            self._control.settimeout(left_s)
            try:
                piece = self._control.recv(1 << 16)
            except TimeoutError:
                raise
            except OSError as error:
                raise self._lost(str(error)) from None
            if not piece:
                raise self._lost("it has ended")
            self._arrived += piece
        line, _, self._arrived = self._arrived.partition(b"\n")
        return json.loads(line)

    def _lost(self, why: str) -> JailError:
        return JailError(f"the process that starts programs is lost: {why}")


class Programs:
    """The running programs of a jail."""

    def __init__(self, jail: Jail, folder: str, *, shares_files: bool) -> None:
        self._jail = jail
        self._terms = {"folder": folder, "shared": shares_files}

    def start(self, role: str, handles: Sequence[int]) -> int:
        """Start a role of the launcher with copies of descriptors, and return its process id in the
        launcher's process table."""
        self._jail.send({"role": role, **self._terms}, handles)
        deadline = monotonic() + _START_S
        while "started" not in (message := self._jail.receive(deadline)):
            pass
        return message["started"]

    def wait(self, pid: int, deadline: float) -> int | None:
        """Wait for a started program; its exit code, or None at the deadline."""
        while True:
            try:
                message = self._jail.receive(deadline)
            except TimeoutError:
                return None
            if message.get("ended") == pid:
                return message["status"]

    def stop(self) -> None:
        """Kill all that run. Their files stay where programs share them."""
        self._jail.end(STOP)


def remove_tree(folder: Path) -> None:
    """Remove a folder even if a program has removed permissions in it, or nested folders deeper
    than the longest path. None of its processes may be left."""
    mark, numbers = secrets.token_hex(8), itertools.count()
    with suppress(FileNotFoundError):
        folder.chmod(0o700)
        while entries := list(os.scandir(folder)):
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)
                for inner in list(os.scandir(entry.path)):
                    if inner.is_dir(follow_symlinks=False):
                        os.chmod(inner.path, 0o700)  # else its `..` cannot be changed
                        os.rename(inner.path, folder / f"{mark}-{next(numbers)}")
                    else:
                        os.unlink(inner.path)
                os.rmdir(entry.path)
        folder.rmdir()


@cache
def missing_walls() -> Mapping[str, str]:
    """By name of a missing wall: what programs can do on this machine without it."""
    jail = Jail()
    try:
        return jail.missing
    finally:
        jail.close()


@cache
def warn_of(missing: tuple[str, ...]) -> None:
    """Warn once of what programs can do on this machine."""
    _log.warning(
        "`code_tests` runs programs that a model wrote, and nothing on this machine keeps them "
        "from this: %s. SECURITY.md says what to do.",
        "; ".join(missing),
    )
