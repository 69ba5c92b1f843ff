"""Calls from any thread into the event loop of the server."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

__all__ = ["LoopCalls"]

_Result = TypeVar("_Result")


class LoopCalls:
    """Makes calls in an event loop, one after the other. Before the loop runs and after its end
    they are made in the thread that asks for them: then nothing else of the loop runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: int | None = None
        self._waiting: deque[Callable[[], object]] = deque()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make calls in `loop` from now on; its thread calls this."""
        with self._lock:
            self._loop, self._thread = loop, threading.get_ident()

    def detach(self) -> None:
        """Make the calls that the loop, which has ended, has left; its thread calls this."""
        with self._lock:
            self._loop = self._thread = None
        self._make_waiting()

    def soon(self, call: Callable[[], _Result]) -> Future[_Result]:
        """The result of a call. In the thread of the loop it is there at once."""
        future = Future[_Result]()

        def make() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = call()
            except Exception as error:  # noqa: BLE001 - raised for the one who asked
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            loop = self._loop if self._thread != threading.get_ident() else None
            if loop is not None:
                self._waiting.append(make)
                # A loop that is closed already: `detach` makes the call.
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._make_waiting)
                return future
        make()
        return future

    def _make_waiting(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    return
                make = self._waiting.popleft()
            make()
