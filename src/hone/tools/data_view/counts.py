"""Counts of lengths and of values over any number of rows, in little memory."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

__all__ = ["MOST_KEPT", "Bar", "Lengths", "Repeated", "Values", "digest_of"]

MOST_KEPT = 1 << 14
"""Values whose text is remembered, to be shown as examples."""
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of a histogram: the rows of `low` to below `high`."""

    low: int
    high: int
    number: int


@dataclass(slots=True)
class Lengths:
    """How many rows have each length; all figures are exact."""

    counts: Counter[int] = field(default_factory=Counter[int])

    def add(self, length: int) -> None:
        """Count a row."""
        self.counts[length] += 1

    def __bool__(self) -> bool:
        return bool(self.counts)

    @property
    def number(self) -> int:
        return self.counts.total()

    @property
    def total(self) -> int:
        """The sum of all lengths."""
        return sum(length * number for length, number in self.counts.items())

    @property
    def mean(self) -> float:
        return self.total / self.number

    @property
    def longest(self) -> int:
        return max(self.counts)

    @property
    def shortest(self) -> int:
        return min(self.counts)

    def quantile(self, share: float) -> int:
        """The smallest length that at least this share of the rows does not exceed."""
        needed, seen = share * self.number, 0
        for length in sorted(self.counts):
            seen += self.counts[length]
            if seen >= needed:
                return length
        raise AssertionError(f"{share=} {self.number=}")

    @property
    def quantiles(self) -> dict[str, int]:
        """Lengths by the name of their quantile, the shortest and the longest among them."""
        found = {f"{round(100 * share)} %": self.quantile(share) for share in _QUANTILES}
        return {"shortest": self.shortest, **found, "longest": self.longest}

    def above(self, limit: int) -> int:
        """The number of rows longer than a limit."""
        return sum(number for length, number in self.counts.items() if length > limit)

    def limits(self, *own: int, most: int = 7) -> list[int]:
        """Limits worth a look, ascending: powers of two from below the lower quartile up to one
        that drops nothing, at most `most` of them, and the run's `own`."""
        first = max(self.quantile(0.25), 1).bit_length() - 1
        last = max(self.longest - 1, 0).bit_length()
        powers = [1 << power for power in range(max(min(first, last), last - most + 1), last + 1)]
        return sorted({*powers, *own})

    def bars(self, most: int = 20) -> list[Bar]:
        """A histogram of at most `most` equal bars. The last one has also what is beyond the 99th
        percentile, so that few long rows do not press all others into one bar."""
        begin, end = self.shortest, max(self.quantile(0.99), self.shortest)
        width = max(_round_up((end - begin + 1) / most), 1)
        begin -= begin % width
        numbers: Counter[int] = Counter()
        last = (end - begin) // width
        for length, number in self.counts.items():
            numbers[min((length - begin) // width, last)] += number
        bars = [
            Bar(begin + place * width, begin + (place + 1) * width, numbers[place])
            for place in range(last + 1)
        ]
        tail = bars[-1]
        return [*bars[:-1], Bar(tail.low, max(tail.high, self.longest + 1), tail.number)]


def _round_up(width: float) -> int:
    """The next width of the form 1, 2 or 5 times a power of ten."""
    scale = 1
    while True:
        for factor in (1, 2, 5):
            if factor * scale >= width:
                return factor * scale
        scale *= 10


def digest_of(text: str) -> int:
    """64 bits of a text."""
    return int.from_bytes(blake2b(text.encode(errors="replace"), digest_size=8).digest())


@dataclass(frozen=True, slots=True)
class Repeated:
    """A value that rows have."""

    number: int
    text: str | None
    """None where it is not remembered."""
    place: str
    """Of the first row with it; empty where it is not remembered."""


@dataclass(slots=True)
class Values:
    """The digests of a value of each row, 8 bytes a row, so that counts are exact; and the first
    different ones as text. That any two of n rows have equal digests by chance has a probability of
    n * n / 2**65."""

    digests: array[int] = field(default_factory=lambda: array("Q"))
    texts: dict[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])
    """Text and place of the first row with it, by digest."""

    def add(self, digest: int, text: str, place: str) -> None:
        """Count the value of a row."""
        self.digests.append(digest)
        if len(self.texts) < MOST_KEPT:
            self.texts.setdefault(digest, (text, place))

    @property
    def number(self) -> int:
        return len(self.digests)

    @property
    def num_distinct(self) -> int:
        return len(np.unique(self._numbers()))

    @property
    def num_repeats(self) -> int:
        """Rows whose value another row before them has."""
        return self.number - self.num_distinct

    def most_frequent(self, most: int, *, at_least: int = 1) -> list[Repeated]:
        """The values of most rows, of equally frequent ones the earliest; those that fewer rows
        have than `at_least` are left out."""
        values, firsts, numbers = np.unique(self._numbers(), return_index=True, return_counts=True)
        order = np.lexsort((firsts, -numbers))[:most]
        found: list[Repeated] = []
        for place in order:
            if numbers[place] >= at_least:
                text, where = self.texts.get(int(values[place]), (None, ""))
                found.append(Repeated(int(numbers[place]), text, where))
        return found

    def _numbers(self) -> np.ndarray[Any, np.dtype[np.uint64]]:
        return np.frombuffer(self.digests, dtype=np.uint64) if self.digests else np.zeros(0, "u8")
