"""Ctrl-C, SIGTERM and SIGHUP end a run at the next safe point."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Self

from hone.distributed.mesh import Mesh
from hone.distributed.signals import Came, handling, raising

__all__ = ["STOPPING", "Interrupt", "Terminated", "terminable"]

STOPPING = "the run ends after this step, or at once while it evaluates, and saves"
"""What a loop does after the first signal."""


class Terminated(SystemExit):
    """SIGTERM or SIGHUP came where nothing can be saved yet."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


@contextmanager
def terminable() -> Generator[Came]:
    """Inside, SIGTERM and SIGHUP raise Terminated, so that the run folder records the cause, and
    Ctrl-C KeyboardInterrupt, all as `raising` does."""
    numbers = [signal.SIGTERM, signal.SIGHUP]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        numbers.append(signal.SIGINT)

    def make(number: int) -> BaseException:
        return KeyboardInterrupt() if number == signal.SIGINT else Terminated(number)

    with raising(make, *numbers) as came:
        yield came


class Interrupt:
    """While entered, the first SIGINT, SIGTERM or SIGHUP is remembered; a second SIGINT stops at
    once. After a SIGHUP nothing is written to the terminal, which is gone.

    The loop asks `is_requested` between steps, where everything can be saved and resumed exactly.
    `notice` is printed after the first signal: what the run does until it ends. `earlier` is the
    signal that had already come when this was made.
    """

    def __init__(self, mesh: Mesh, notice: str, *, earlier: int | None = None) -> None:
        self.number = earlier
        """The signal that asked the run to stop: this process's until `is_requested` has returned
        True, then the same in all processes. None without one."""
        self._mesh = mesh
        self.notice = notice
        self._handlers = ExitStack()
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
        numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
        self._handlers.enter_context(handling(self._handle, *numbers))
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.has_come():
            raise KeyboardInterrupt
        if number == signal.SIGHUP:
            self._leave_terminal()
        if self._mesh.is_first:
            text = f"{signal.Signals(number).name}: {self.notice}"
            if number == signal.SIGINT:
                text = f"{self.notice}; Ctrl-C again ends it at once"
            # Past Python's buffers, which the signal may have found in the middle of a write.
            with suppress(OSError):  # whoever read it may be gone
                os.write(2, f"{text}\n".encode())
        if not self.has_come():
            self.number = number

    def _leave_terminal(self) -> None:
        """Writing to a terminal that is gone would be an error."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in self._terminals:
            os.dup2(nowhere, stream)
        os.close(nowhere)
