"""Signal handlers for a block of code."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

__all__ = ["PendingSignal", "handling", "raising"]


@contextmanager
def handling(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers, *numbers: signal.Signals
) -> Generator[None]:
    """Context manager in which `handler` handles these signals. A SIGHUP that this process was
    started to ignore (`nohup`) stays ignored."""
    taken = [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in taken}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@dataclass(slots=True)
class PendingSignal:
    """A received signal that is not handled yet."""

    number: int | None = None

    def take(self) -> int | None:
        """Return the signal's number and clear it. The caller handles it."""
        number, self.number = self.number, None
        return number


@contextmanager
def raising(
    make: Callable[[int], BaseException], *numbers: signal.Signals
) -> Generator[PendingSignal]:
    """Context manager in which each of these signals raises `make(number)`.

    Python swallows exceptions raised in a `__del__`, in callbacks of weak references, and in code
    that catches all. So the signal is also kept: callers can check it before they begin work, and
    it is raised once more if the block ends without an exception.
    """
    came = PendingSignal()

    def handle(number: int, frame: FrameType | None) -> None:
        came.number = number
        raise make(number)

    with handling(handle, *numbers):
        yield came
        if (number := came.take()) is not None:
            raise make(number)
