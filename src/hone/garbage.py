"""Python's garbage collector, where many objects live long."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["COLLECTION_THRESHOLDS", "rare_garbage_collection"]

COLLECTION_THRESHOLDS = 10_000, 10, 10
"""Allocations before Python's garbage collector looks at each of its three generations. Python's
own value for the youngest is 700."""


@contextmanager
def rare_garbage_collection() -> Generator[None]:
    """Context manager in which Python's garbage collector runs rarely and skips the objects that
    already exist (modules, models).

    With the default settings it took a third of the CPU time of a process that drives 512 engines,
    and now 5 %: the objects of ten thousand samples live long, and every collection scans them
    again (benchmarks/README.md). The same holds for the samples that `hone plan` simulates.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTION_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
