"""Timers that split the time of a step into spans.

    spans = Spans()
    with spans.span("generate"):
        with spans.span("reward"):      # counted as "generate/reward"
            ...
    spans.take()  # {"generate": 3.1, "generate/reward": 0.2, "unattributed": 0.01, "step": 3.11}

Times are host wall time. A phase that leaves work queued on a GPU must end with something that
waits for it (reading a loss does), or the next phase pays for it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Spans"]

_RESERVED = ("unattributed", "step")


class Spans:
    """Nested timers of one thread. A span costs about a microsecond.

    `clock` returns seconds. `max_trace_events` bounds the memory of the trace; the oldest events
    are dropped. `on_begin` and `on_end` are called with the path of each span that begins or has
    ended.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.perf_counter,
        max_trace_events: int = 100_000,
        on_begin: Callable[[str], None] = lambda path: None,
        on_end: Callable[[str], None] = lambda path: None,
    ) -> None:
        self._on_begin, self._on_end = on_begin, on_end
        self._clock = clock
        self._origin = self._taken_at = clock()
        self._origin_ns = time.time_ns()
        """Wall clock time of the origin, by which traces of several processes are aligned."""
        self._open: list[tuple[str, float]] = []  # path, start; innermost last
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._trace: deque[tuple[str, float, float]] = deque(maxlen=max_trace_events)
        self._ended: list[tuple[str, float, float]] = []

    @contextmanager
    def span(self, name: str) -> Generator[None]:
        """Context manager that counts its time under `name`, prefixed by the enclosing spans'
        names."""
        if name in _RESERVED:
            raise ValueError(f"A span may not be called {name!r}: `take` reports that itself.")
        path = f"{self._open[-1][0]}/{name}" if self._open else name
        start = self._clock()
        self._open.append((path, start))
        try:
            self._on_begin(path)
            yield
        finally:
            self._open.pop()
            end = self._clock()
            self._on_end(path)
            self._seconds[path] += end - max(start, self._taken_at)
            self._trace.append((path, start, end))
            if not self._open:
                self._ended.append((path, start, end))

    def take(self) -> dict[str, float]:
        """Seconds by span path since the last call (or since construction). `step` is the wall
        time, `unattributed` the time that no top-level span covers: the top-level spans and
        `unattributed` add up to `step`. Open spans count up to now."""
        now = self._clock()
        seconds, self._seconds = self._seconds, defaultdict(float)
        for path, start in self._open:
            seconds[path] += now - max(start, self._taken_at)
        wall, self._taken_at = now - self._taken_at, now
        top_level = sum(value for path, value in seconds.items() if "/" not in path)
        return {**seconds, "unattributed": max(wall - top_level, 0.0), "step": wall}

    def take_ended(self) -> list[tuple[str, float, float]]:
        """Outermost spans that have ended since the last call, as (name, begin, end) in seconds of
        wall clock time."""
        ended, self._ended = self._ended, []
        base = self._origin_ns / 1e9 - self._origin
        return [(path, base + start, base + end) for path, start, end in ended]

    def trace_events(self) -> list[dict[str, Any]]:
        """Finished spans as Chrome trace events (complete events; microseconds)."""
        # Python's own thread id has too many bits.
        pid, tid = os.getpid(), threading.get_native_id()
        return [
            {
                "name": path.rpartition("/")[2],
                "cat": path,
                "ph": "X",
                "ts": (start - self._origin) * 1e6,
                "dur": (end - start) * 1e6,
                "pid": pid,
                "tid": tid,
            }
            for path, start, end in self._trace
        ]

    def write_trace(self, path: Path) -> None:
        """Write a file that https://ui.perfetto.dev and chrome://tracing open."""
        process = {"ph": "M", "name": "process_name", "pid": os.getpid(), "args": {"name": "hone"}}
        trace = {
            "traceEvents": [process, *self.trace_events()],
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": self._origin_ns,
        }
        path.write_text(json.dumps(trace))
