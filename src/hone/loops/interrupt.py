"""Ctrl-C, SIGTERM and SIGHUP end a run at the next safe point."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

from hone.distributed.mesh import Mesh

__all__ = ["STOPPING", "Interrupt", "Terminated", "terminable"]

STOPPING = "the run ends after this step, or at once while it evaluates, and saves"
"""What a loop does after the first Ctrl-C."""


class Terminated(SystemExit):
    """SIGTERM or SIGHUP came where nothing can be saved yet."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


@contextmanager
def terminable() -> Generator[None]:
    """Inside, SIGTERM and SIGHUP raise Terminated, so that the run folder records the cause."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    wanted = [signal.SIGTERM, *_hangup()]
    previous = {number: signal.signal(number, end) for number in wanted}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _hangup() -> list[signal.Signals]:
    """SIGHUP, unless this process was started to ignore it (`nohup`)."""
    return [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]


class Interrupt:
    """While entered, the first SIGINT, SIGTERM or SIGHUP is remembered; a second SIGINT stops at
    once. After a SIGHUP nothing is written to the terminal, which is gone.

    The loop asks `is_requested` between steps, where everything can be saved and resumed exactly.
    `notice` is printed after the first Ctrl-C: what the run does until it ends. `earlier` is the
    signal that had already come when this was made.
    """

    def __init__(self, mesh: Mesh, notice: str, *, earlier: int | None = None) -> None:
        self.number = earlier
        """The signal that asked the run to stop: this process's until `is_requested` has returned
        True, then the same in all processes. None without one."""
        self._mesh = mesh
        self._notice = notice
        self._previous: dict[signal.Signals, object] = {}
        self._terminals: list[int] = []
        """Those of the standard streams that are one."""

    def is_requested(self) -> bool:
        """Whether any process has been asked to stop. Collective: all stop after the same step."""
        agreed = next((n for n in self._mesh.gather(self.number) if n is not None), None)
        if agreed is not None:  # else a signal may have come since
            self.number = agreed
        return agreed is not None

    def has_come(self) -> bool:
        """Whether this process has been asked to stop. Not collective, and costs nothing."""
        return self.number is not None

    def __enter__(self) -> Self:
        self._terminals = [stream for stream in (0, 1, 2) if os.isatty(stream)]
        for number in (signal.SIGINT, signal.SIGTERM, *_hangup()):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.has_come():
            raise KeyboardInterrupt
        if number == signal.SIGINT and self._mesh.is_first:
            # Past Python's buffers, which the signal may have found in the middle of a write.
            os.write(2, f"{self._notice}; Ctrl-C again ends it at once\n".encode())
        if number == signal.SIGHUP:
            self._leave_terminal()
        if not self.has_come():
            self.number = number

    def _leave_terminal(self) -> None:
        """Writing to a terminal that is gone would be an error."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in self._terminals:
            os.dup2(nowhere, stream)
        os.close(nowhere)
