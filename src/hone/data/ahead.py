"""The next parts of a sequence, made by a thread of its own while those before are used.

    ahead = Ahead(source.make, max_bytes=2**24, max_rows=4096)
    part = ahead.part(0)                    # starts the thread, which goes on with those after it
    part = ahead.part(part.following)       # is there already, or is waited for

What comes is what `make` gives for the same start, whichever thread it ran in, and an error that it
raises is raised for the one who asks for that part.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Ahead", "Part"]

_END_S = 5.0
"""Longest wait for the part that is being made when the process ends, such as one of a server that
does not answer."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part(Generic[T]):
    """Rows that are made together."""

    rows: Sequence[T]
    following: int
    """The start of the part after it."""
    num_bytes: int
    """What it counts of the bytes that are made ahead."""


class Ahead(Generic[T]):
    """Parts by their start. `make` is a bound method, whose object is not kept alive; it runs in
    one thread, which ends with this object or with the process.

    Parts that nobody has asked for yet have at most `max_bytes` and `max_rows` together, if each is
    as large as the one before it.
    """

    def __init__(self, make: Callable[[int], Part[T]], *, max_bytes: int, max_rows: int) -> None:
        self._work: _Work[T] = _Work(weakref.WeakMethod(make), max_bytes, max_rows)
        # Before the interpreter ends too: a thread must not be cut off within foreign code.
        weakref.finalize(self, self._work.stop)

    def part(self, start: int) -> Part[T]:
        """The part that begins at `start`. Raises what `make` raises for it."""
        return self._work.part(start)


class _Work(Generic[T]):
    """The parts and the state that the thread shares with the threads that ask for parts."""

    def __init__(
        self, make: weakref.WeakMethod[Callable[[int], Part[T]]], max_bytes: int, max_rows: int
    ) -> None:
        self._make, self._max_bytes, self._max_rows = make, max_bytes, max_rows
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._made: dict[int, Part[T] | BaseException] = {}
        self._next: int | None = None
        """The start of the part that is made next, or is being made; None after an error."""
        self._asked: int | None = None
        """The start of the part that is waited for."""
        self._round = 0
        """Grows where another part than the next one is asked for: what is being made is old."""
        self._last_bytes = 0
        self._is_stopped = False

    def part(self, start: int) -> Part[T]:
        with self._changed:
            if start not in self._made and start != self._next:
                self._made.clear()
                self._next, self._round = start, self._round + 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hone-rows", daemon=True)
                self._thread.start()
            self._asked = start
            self._changed.notify_all()
            self._changed.wait_for(lambda: start in self._made)
            self._asked = None
            found = self._made.pop(start)
            self._changed.notify_all()
        if isinstance(found, BaseException):
            raise found
        return found

    def stop(self) -> None:
        """End the thread, after the part that it makes now."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(_END_S)

    def _run(self) -> None:
        while (begun := self._begin()) is not None:
            start, number = begun
            make = self._make()
            if make is None:
                return
            made: Part[T] | BaseException
            try:
                made = make(start)
            except BaseException as error:  # noqa: BLE001  raised for the one who asks
                made = error
            with self._changed:
                if number == self._round:
                    self._keep(start, made)
                    self._changed.notify_all()
            del make, made  # what waits for room must not keep their object alive

    def _begin(self) -> tuple[int, int] | None:
        """Wait until a part is to be made: its start, and the round. None: the thread ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._has_room())
            if self._is_stopped or self._next is None:
                return None
            return self._next, self._round

    def _keep(self, start: int, made: Part[T] | BaseException) -> None:
        self._made[start] = made
        self._next = None
        if not isinstance(made, BaseException):
            self._next, self._last_bytes = made.following, made.num_bytes

    def _has_room(self) -> bool:
        if self._next is None:
            return False
        parts = [part for part in self._made.values() if isinstance(part, Part)]
        num_bytes = sum(part.num_bytes for part in parts) + self._last_bytes
        num_rows = sum(len(part.rows) for part in parts)
        has_room = num_bytes <= self._max_bytes and num_rows < self._max_rows
        return has_room or self._asked == self._next
