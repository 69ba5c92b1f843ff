"""Communication between processes that collect together."""

from __future__ import annotations

from typing import Protocol, TypeVar

__all__ = ["Comm", "SingleProcess"]

T = TypeVar("T")


class Comm(Protocol):
    """The processes that collect together. All make the same calls in the same order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def gather(self, value: T, /) -> list[T]:
        """The picklable value of every process, by rank."""
        ...

    def total(self, *counts: int) -> tuple[int, ...]:
        """Each count, summed over all processes. Called at every engine step."""
        ...


class SingleProcess:
    """The `Comm` of a process that collects alone."""

    rank = 0
    size = 1

    def gather(self, value: T, /) -> list[T]:
        return [value]

    def total(self, *counts: int) -> tuple[int, ...]:
        return counts
