"""Limit on the tokens of an engine step, reduced after an out-of-memory error and raised again
later."""

from __future__ import annotations

__all__ = ["StepLimit"]

_PATIENCE = 64
"""Steps that must succeed before the limit is raised, the first time."""


class StepLimit:
    """Limit on the tokens of one step, and so on the sequences that run at once.

    A failure sets the limit to half of the failed step's tokens. After a number of steps without a
    failure the limit is doubled, up to the configured one. Each failure doubles that number, so a
    limit that fails is tried more and more rarely. The limit never falls below `least`.
    """

    def __init__(self, most: int) -> None:
        self.most = self.now = most
        self.least = 1
        self._patience = _PATIENCE
        self._num_good = 0

    def require(self, num_tokens: int) -> None:
        """Allow steps of `num_tokens` tokens from now on, which cannot be divided."""
        self.least = max(self.least, num_tokens)
        self.now = max(self.now, self.least)

    def fail(self, num_tokens: int) -> bool:
        """Record that a step of `num_tokens` ran out of memory; returns False where no smaller step
        is possible."""
        if num_tokens <= self.least:
            return False
        self.now = max(num_tokens // 2, self.least)
        self._patience *= 2
        self._num_good = 0
        return True

    def succeed(self) -> bool:
        """Record a successful launch; returns whether the limit has been raised."""
        if self.now == self.most:
            return False
        self._num_good += 1
        if self._num_good < self._patience:
            return False
        self.now, self._num_good = min(2 * self.now, self.most), 0
        return True
