"""Where programs that a model wrote run: processes behind walls, started by a process of their own.

    jail = Jail()
    with jail.run() as programs:
        pid = programs.start("script", [program, given, written])
        status = programs.wait(pid, deadline)

`launcher.py` is that process and `walls.py` what it raises; SECURITY.md says what they contain.
What asks it (a reward worker) has keys in its environment, and judges; it never runs a program.
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

from hone.rewards.launcher import END

__all__ = ["Jail", "JailError", "launchers", "missing_walls", "remove_tree", "warn_of"]

_log = logging.getLogger(__name__)

_START = (
    "import sys; sys.path.insert(0, {root!r}); from hone.rewards import launcher; "
    "del sys.path[0]; launcher.main()"
)
_ROOT = str(Path(__file__).parents[2])
_START_S, _END_S = 60.0, 10.0

launchers: set[int] = set()
"""Process ids of the launchers of this process, which outlive a call of a reward function."""


class JailError(RuntimeError):
    """The process that starts programs could not be started, or has ended."""


class Jail:
    """A launcher, started at once, and the folder that its programs may write to.

    `folder` is removed by whoever has made it; unset, the jail makes one and removes it. Of
    `refused`, kinds of walls, it goes without. Raises JailError where it does not start.
    """

    def __init__(self, folder: Path | None = None, refused: Sequence[str] = ()) -> None:
        self._own = None if folder is not None else tempfile.mkdtemp(prefix="hone-code-")
        self._folder = Path(folder or self._own or "")
        self._folder.chmod(0o711)  # programs may be another user's, who passes through
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
        """What no wall of this machine keeps programs from, in words."""

        with tempfile.TemporaryFile() as empty, self.run() as programs:
            pid = programs.start("trial", [empty.fileno()])
            if programs.wait(pid, monotonic() + _START_S) != 0:
                raise JailError(f"no program can be started in {self._folder}")

    @contextmanager
    def run(self) -> Generator[Programs]:
        """Where programs of one test run; when it is left they are killed, and what they have
        written is removed."""
        folder = self._mount
        if not self._has_tmpfs:
            folder = self._folder / f"program-{next(self._numbers)}"
            folder.mkdir(mode=0o700)
            if self._user != os.geteuid():
                os.chown(folder, self._user, self._user)
        try:
            yield Programs(self, str(folder))
        finally:
            self.send(END)
            deadline = monotonic() + _END_S
            try:
                while self.receive(deadline) != END:
                    pass
            except TimeoutError:  # what comes later would be taken for the next test's
                self.close()
                raise self._lost("it cannot end what it has started") from None
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

    def send(self, message: Any, handles: Sequence[int] = ()) -> None:
        """Give the launcher a message and descriptors. Raises JailError where it is lost."""
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], handles)
        except OSError as error:
            raise self._lost(str(error)) from None

    def receive(self, deadline: float) -> Any:
        """Its next message. Raises TimeoutError at the deadline, JailError where it is lost."""
        while b"\n" not in self._arrived:
            if (left_s := deadline - monotonic()) <= 0.0:  # though orphans end without end
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
    """What runs in a jail at a time."""

    def __init__(self, jail: Jail, folder: str) -> None:
        self._jail = jail
        self._folder = folder

    def start(self, role: str, handles: Sequence[int]) -> int:
        """Start a role of the launcher with copies of descriptors, and return its process id
        there."""
        self._jail.send({"role": role, "folder": self._folder}, handles)
        deadline = monotonic() + _START_S
        while "started" not in (message := self._jail.receive(deadline)):
            pass
        return message["started"]

    def wait(self, pid: int, deadline: float) -> int | None:
        """The exit code of what has been started; None where the deadline comes first."""
        while True:
            try:
                message = self._jail.receive(deadline)
            except TimeoutError:
                return None
            if message.get("ended") == pid:
                return message["status"]


def remove_tree(folder: Path) -> None:
    """Remove a folder whatever a program has made of it: folders without permissions, or nested
    deeper than a path may be long. None of its processes may be left."""
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
    """What no wall of this machine keeps programs from, in words, by the name of the wall."""
    jail = Jail()
    try:
        return jail.missing
    finally:
        jail.close()


@cache
def warn_of(missing: tuple[str, ...]) -> None:
    """Say once what programs can do here."""
    _log.warning(
        "`code_tests` runs programs that a model wrote, and nothing on this machine keeps them "
        "from this: %s. SECURITY.md says what to do.",
        "; ".join(missing),
    )
