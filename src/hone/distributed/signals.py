"""Handlers of signals for a block of code."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

__all__ = ["Came", "handling", "raising"]


@contextmanager
def handling(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers, *numbers: signal.Signals
) -> Generator[None]:
    """Inside, `handler` gets these signals. A SIGHUP that this process was started to ignore
    (`nohup`) stays ignored."""
    taken = [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in taken}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@dataclass(slots=True)
class Came:
    """A signal that has come, until somebody takes it."""

    number: int | None = None

    def take(self) -> int | None:
        """Its number; from now on it is the caller's matter."""
        number, self.number = self.number, None
        return number


@contextmanager
def raising(make: Callable[[int], BaseException], *numbers: signal.Signals) -> Generator[Came]:
    """Inside, each of these signals raises what `make` gives for its number.

    Python swallows what is raised in a `__del__`, in callbacks of weak references, and in code that
    catches all. So the signal is kept, too: for whoever asks before work that should not begin, and
    it is raised once more where the block ends as if nothing had come.
    """
    came = Came()

    def handle(number: int, frame: FrameType | None) -> None:
        came.number = number
        raise make(number)

    with handling(handle, *numbers):
        yield came
        if (number := came.take()) is not None:
            raise make(number)
