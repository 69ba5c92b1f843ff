"""Times of calls on the current GPU."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch


def device_ms(work: Callable[[], object], repeats: int = 10) -> float:
    """Median milliseconds on the device, after two calls to warm up."""
    work()
    work()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in events)


def wall_ms(work: Callable[[], object], repeats: int) -> float:
    """Median milliseconds of a call with all that it starts."""
    times: list[float] = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(1e3 * (perf_counter() - start))
    return median(times)
