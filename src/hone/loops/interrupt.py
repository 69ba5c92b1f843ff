"""Ctrl-C ends a run at the next safe point."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self

from hone.distributed.mesh import Mesh

__all__ = ["Interrupt"]


class Interrupt:
    """While entered, the first SIGINT or SIGTERM is remembered; a second SIGINT stops at once.

    The loop asks `is_requested` between steps, where everything can be saved and resumed exactly.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._seen = False
        self._previous: dict[signal.Signals, object] = {}

    def is_requested(self) -> bool:
        """Whether any process has been asked to stop. Collective: all stop after the same step."""
        return any(self._mesh.gather(self._seen))

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
        if self._seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._seen = True
