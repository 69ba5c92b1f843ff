"""Ctrl-C, SIGTERM and SIGHUP end a run at the next safe point."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Self

from hone.distributed.mesh import Mesh
from hone.distributed.signals import PendingSignal, handling, raising

__all__ = ["STOPPING", "Interrupt", "Terminated", "terminable"]

STOPPING = "the run ends after this step, or at once while it evaluates, and saves"
"""Notice after the first signal: what the loop does then."""


class Terminated(SystemExit):
    """SIGTERM or SIGHUP came at a time when nothing can be saved yet."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


@contextmanager
def terminable() -> Generator[PendingSignal]:
    """Context manager in which SIGTERM and SIGHUP raise Terminated, so that the run folder records
    the cause, and Ctrl-C raises KeyboardInterrupt. See `raising`."""
    numbers = [signal.SIGTERM, signal.SIGHUP]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        numbers.append(signal.SIGINT)

    def make(number: int) -> BaseException:
        return KeyboardInterrupt() if number == signal.SIGINT else Terminated(number)

    with raising(make, *numbers) as came:
        yield came


class Interrupt:
    """Context manager that records the first SIGINT, SIGTERM or SIGHUP; a second SIGINT stops at
    once. After a SIGHUP nothing is written to the terminal, which is gone.

    The loop asks `is_requested` between steps, where everything can be saved and resumed exactly.
    `notice` is printed after the first signal: what the run does until it ends. `earlier` is a
    signal that came before this object existed.
    """

    def __init__(self, mesh: Mesh, notice: str, *, earlier: int | None = None) -> None:
        self.number = earlier
        """The signal that asked the run to stop, or None. It is this process's own until
        `is_requested` has returned True, then the same in all processes."""
        self._mesh = mesh
        self.notice = notice
        self._handlers = ExitStack()
        self._terminals: list[int] = []
        """The standard streams that are terminals."""

    def is_requested(self) -> bool:
        """Whether any process got a signal. Collective: all stop after the same step."""
        agreed = next((n for n in self._mesh.gather(self.number) if n is not None), None)
        if agreed is not None:  # otherwise keep a signal that has come since
            self.number = agreed
        return agreed is not None

    def has_come(self) -> bool:
        """Whether this process got a signal. Not collective, and cheap."""
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
            # Not through Python's buffers: the signal may have interrupted a write to them.
            with suppress(OSError):  # its reader may be gone
                os.write(2, f"{text}\n".encode())
        if not self.has_come():
            self.number = number

    def _leave_terminal(self) -> None:
        """Redirect terminals to /dev/null: writing to one that is gone would be an error."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in self._terminals:
            os.dup2(nowhere, stream)
        os.close(nowhere)
