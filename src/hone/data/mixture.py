"""From which source the next row comes.

The j-th row of a source with share w may come no earlier than draw floor(j / w) and no later than
draw ceil((j + 1) / w) - 1. Taking the source with the earliest deadline among those allowed so far
always meets these windows (Baruah et al., Proportionate Progress, Algorithmica 1996). So after k
draws each source has given more than k w - 1 and fewer than k w + 1 rows: where the k w of a step
are whole numbers, each step has exactly so many rows of each source.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from hone.errors import UserError

__all__ = ["Mixture"]


class Mixture:
    """Several sources by weight. `weights` are relative to one another, positive and finite; else
    UserError is raised."""

    def __init__(self, weights: Sequence[float]) -> None:
        if not all(0 < weight < math.inf for weight in weights):
            raise UserError(f"source weights must be positive and finite, got {list(weights)}")
        exact = [Fraction(str(weight)) for weight in weights]
        self.shares = tuple(weight / sum(exact) for weight in exact)

    def next_source(self, served: Sequence[int]) -> int:
        """The source of the next row, where the sources have `served` so many so far."""
        draws = sum(served) + 1
        allowed = (
            (Fraction(num + 1) / share, number)
            for number, (num, share) in enumerate(zip(served, self.shares, strict=True))
            if num < share * draws
        )
        return min(allowed)[1]
