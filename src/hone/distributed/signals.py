"""Handlers of signals for a block of code."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

__all__ = ["handling"]


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
