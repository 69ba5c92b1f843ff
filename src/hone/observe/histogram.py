"""Histogram of a step's values, small enough to keep for every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Histogram"]

NUM_BINS = 31
"""Odd, so that the middle of the range is the middle of a bin."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values in bins of equal width; the last bin includes its upper edge."""

    counts: tuple[int, ...]
    low: float
    """Lower edge of the first bin."""
    high: float
    """Upper edge of the last bin."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Histogram | None:
        """Histogram of the finite values, or None if there are none. Equal values get a range of
        width 1 around them."""
        array = np.asarray(values, dtype=np.float64)
        array = array[np.isfinite(array)]
        if not array.size:
            return None
        counts, edges = np.histogram(array, bins=NUM_BINS)
        return cls(tuple(counts.tolist()), float(edges[0]), float(edges[-1]))

    @property
    def edges(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Edges of the bins, float64 [len(counts) + 1]."""
        return np.linspace(self.low, self.high, len(self.counts) + 1)
