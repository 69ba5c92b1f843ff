"""Ctrl-C ends a run at the next safe point."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self

__all__ = ["Interrupt"]


class Interrupt:
    """While entered, the first SIGINT or SIGTERM is remembered; a second SIGINT stops at once.

    The loop looks at `requested` between steps, where everything can be saved and resumed exactly.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
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
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
