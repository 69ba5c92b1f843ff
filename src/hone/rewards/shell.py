"""A shell for commands that a model has written: each of them runs behind the walls of `walls.py`.

    with Shell() as shell:
        shell.run("echo $((37*58)) > a")
        ran = shell.run("cat a")
    assert ran.output == "2146\\n"

For programs that play episodes (`env.harness.command`) and for environments. Commands share one
folder, and see no other files but those of the system and of Python. They have no network, an
environment without any key, and no process of an earlier command.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Self

from hone.rewards.jail import Jail, JailError, Programs

__all__ = ["REQUIRED", "Ran", "Shell"]

REQUIRED = ("secrets", "network", "files")
"""Walls without which a command could read the key of its episode and ask the policy with it, or
read the task."""

_START = """
import os, resource, signal
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
os.dup2(1, 2)
_, hard = resource.getrlimit(resource.RLIMIT_AS)
most = {memory} if hard == resource.RLIM_INFINITY else min({memory}, hard)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
here = os.getcwd()
names = {{"PATH": {path!r}, "HOME": here, "TMPDIR": here, "LANG": "C.UTF-8"}}
try:
    os.execve("/bin/sh", ["sh", "-c", {command!r}], names)
except (OSError, ValueError) as error:  # it is too long for the system, or has a null in it
    os.write(1, f"sh: {{error}}\\n".encode())
    os._exit(126)
"""
"""The program that becomes the shell, behind the walls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a command has done."""

    output: str
    """The beginning of what it has written, errors among it, in the order of writing. Bytes that
    are no UTF-8 are replaced."""
    exit_code: int | None
    """Negative: the signal that has ended it. None: it was killed at its deadline."""


class Shell:
    """Runs commands one after the other, as `sh -c` does, in a folder of their own."""

    def __init__(
        self,
        *,
        timeout_s: float = 10.0,
        max_output_bytes: int = 1 << 16,
        memory_gib: float = 1.0,
        required: Collection[str] = REQUIRED,
    ) -> None:
        """`timeout_s` is the longest time of a command, and `memory_gib` the address space of each
        of its processes. `required` are names of walls in SECURITY.md: raises JailError where this
        machine lacks one of them."""
        self._timeout_s, self._max_output_bytes = timeout_s, max_output_bytes
        self._memory_bytes = int(memory_gib * (1 << 30))
        self._path = f"{Path(sys.executable).parent}:/usr/local/bin:{os.defpath}"
        with ExitStack() as stack:
            jail = Jail()
            stack.callback(jail.close)
            if lacking := [jail.missing[name] for name in required if name in jail.missing]:
                raise JailError(
                    f"nothing on this machine keeps a command from this: {'; '.join(lacking)}. "
                    "SECURITY.md says what is needed; Shell(required=()) runs commands without"
                )
            self._jail = jail
            self._programs: Programs = stack.enter_context(jail.run(shares_files=True))
            self._open = stack.pop_all()

    def run(self, command: str) -> Ran:
        """Run a command to its end, or to its deadline. All of its processes are killed then.

        Raises JailError where they cannot be."""
        words = {"memory": self._memory_bytes, "path": self._path, "command": command}
        with (
            tempfile.TemporaryFile() as text,
            open(os.devnull, "rb") as given,
            tempfile.TemporaryFile() as written,  # without a name: a command cannot remove it
        ):
            text.write(_START.format(**words).encode(errors="replace"))
            text.seek(0)
            handles = [text.fileno(), given.fileno(), written.fileno()]
            pid = self._programs.start("script", handles)
            code = self._programs.wait(pid, monotonic() + self._timeout_s)
            self._programs.stop()
            written.seek(0)
            output = written.read(self._max_output_bytes).decode(errors="replace")
        return Ran(output=output, exit_code=code)

    def close(self) -> None:
        """Kill all that runs, and remove the files."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
