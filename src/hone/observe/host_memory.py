"""Host memory of this process: all of it, and the part in which a leak shows.

    count_as_cache(store)           # what has `host_bytes`, and a bound on them
    host_memory()                   # {"mem/rss_gib": ..., "mem/rss_without_caches_gib": ...}

Resident memory grows for hundreds of steps without a leak: while a store of pixels or features
fills up to its bound, and as its entries lie scattered among what a step allocates and frees, so
that the allocator keeps free memory between them.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import Protocol
from weakref import ref

import psutil

from hone.hardware import GIB

__all__ = ["HostCache", "count_as_cache", "host_memory"]


class HostCache(Protocol):
    """A store that drops what is least needed when it is full."""

    @property
    def host_bytes(self) -> int:
        """Bytes that it keeps in host memory now. Read by other threads."""
        ...


_caches: list[ref[HostCache]] = []
"""The bounded stores of this process. Other threads may add some while one reads."""


def count_as_cache(cache: HostCache) -> None:
    """Leave the entries of a bounded store out of what may be a leak, as long as it lives."""
    _caches.append(ref(cache, _caches.remove))


def host_memory() -> dict[str, float]:
    """The resident memory of this process in GiB, by metric: all of it, and what is left without
    the entries of bounded stores and without what the allocator has free."""
    rss = psutil.Process().memory_info().rss
    caches = [found for each in tuple(_caches) if (found := each()) is not None]
    cached = sum(each.host_bytes for each in caches)
    rest = rss - cached - _free_bytes()()
    return {"mem/rss_gib": rss / GIB, "mem/rss_without_caches_gib": rest / GIB}


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@cache
def _free_bytes() -> Callable[[], int]:
    """A function that counts the bytes that the C library's allocator keeps free; always 0 where it
    does not say (another library than glibc, or one before 2.33)."""
    if sys.platform != "linux":
        return lambda: 0
    try:
        read = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return lambda: 0
    read.restype = _MallocInfo
    return lambda: int(read().fordblks)
