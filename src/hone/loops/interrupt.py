"""Ctrl-C, SIGTERM and SIGHUP end a run at the next safe point."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

from hone.distributed.mesh import Mesh

__all__ = ["Interrupt", "Terminated", "terminable"]


class Terminated(SystemExit):
    """SIGTERM or SIGHUP came where nothing can be saved yet."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


@contextmanager
def terminable() -> Generator[None]:
    """Inside, SIGTERM and SIGHUP raise Terminated, so that the run folder learns of it."""

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
    """SIGHUP, unless this process was told to ignore it (`nohup`)."""
    return [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]


class Interrupt:
    """While entered, the first SIGINT, SIGTERM or SIGHUP is remembered; a second SIGINT stops at
    once. After a SIGHUP nothing is written to the terminal, which is gone.

    The loop asks `is_requested` between steps, where everything can be saved and resumed exactly.
    `goes_on` tells who pressed Ctrl-C what the run does meanwhile; with `seen` a first one came
    earlier.
    """

    def __init__(self, mesh: Mesh, goes_on: str, *, seen: bool = False) -> None:
        self._mesh = mesh
        self._goes_on = goes_on
        self._seen = seen
        self._previous: dict[signal.Signals, object] = {}
        self._terminals: list[int] = []
        """Those of the standard streams that are one."""

    def is_requested(self) -> bool:
        """Whether any process has been asked to stop. Collective: all stop after the same step."""
        return any(self._mesh.gather(self._seen))

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
        if self._seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGINT and not self._seen and self._mesh.is_first:
            # Past Python's buffers, which the signal may have found in the middle of a write.
            os.write(2, f"{self._goes_on}; Ctrl-C again ends it at once\n".encode())
        if number == signal.SIGHUP:
            self._leave_terminal()
        self._seen = True

    def _leave_terminal(self) -> None:
        """Writing to a terminal that is gone would be an error."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in self._terminals:
            os.dup2(nowhere, stream)
        os.close(nowhere)
