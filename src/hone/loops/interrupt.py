"""Ctrl-C ends a run at the next safe point."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Self

from hone.distributed.mesh import Mesh

__all__ = ["Interrupt"]


class Interrupt:
    """While entered, the first SIGINT or SIGTERM is remembered; a second SIGINT stops at once.

    The loop asks `is_requested` between steps, where everything can be saved and resumed exactly.
    `goes_on` tells who pressed Ctrl-C what the run does meanwhile; with `seen` a first one came
    earlier.
    """

    def __init__(self, mesh: Mesh, goes_on: str, *, seen: bool = False) -> None:
        self._mesh = mesh
        self._goes_on = goes_on
        self._seen = seen
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
        if number == signal.SIGINT and not self._seen and self._mesh.is_first:
            # Past Python's buffers, which the signal may have found in the middle of a write.
            os.write(2, f"{self._goes_on}; Ctrl-C again ends it at once\n".encode())
        self._seen = True
