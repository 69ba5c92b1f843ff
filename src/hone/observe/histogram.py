"""How the values of a step are spread, small enough to be kept for every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Histogram"]

NUM_BINS = 31
"""Odd: the middle of a bin is the middle of all."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values in bins of equal width; the last bin includes its upper edge."""

    counts: tuple[int, ...]
    low: float
    """Lower edge of the first bin."""
    high: float
    """Upper edge of the last."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Histogram | None:
        """Of finite values; None without any. Equal values are in the middle of a range of 1."""
        held = np.asarray(values, dtype=np.float64)
        held = held[np.isfinite(held)]
        if not held.size:
            return None
        counts, edges = np.histogram(held, bins=NUM_BINS)
        return cls(tuple(counts.tolist()), float(edges[0]), float(edges[-1]))

    @property
    def edges(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """`[len(counts) + 1]` float64."""
        return np.linspace(self.low, self.high, len(self.counts) + 1)
