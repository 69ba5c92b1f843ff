"""How much a step of the engine computes, less where memory has ended, and more again."""

from __future__ import annotations

__all__ = ["StepLimit"]

_PATIENCE = 64
"""Steps that must succeed before the limit is raised, the first time."""


class StepLimit:
    """Tokens of one step, and so sequences that run at once.

    A failure halves what the step had. The limit is doubled, up to the configured one, after so
    many steps without a failure; each failure makes that twice as many, so that a limit which is
    tried in vain is tried ever more rarely.
    """

    def __init__(self, most: int) -> None:
        self.most = self.now = most
        self._patience = _PATIENCE
        self._num_good = 0

    def fail(self, num_tokens: int) -> bool:
        """A step of so many tokens ran out of memory; False where none can be smaller."""
        if num_tokens <= 1:
            return False
        self.now = num_tokens // 2
        self._patience *= 2
        self._num_good = 0
        return True

    def succeed(self) -> bool:
        """A step was launched; whether the limit has been raised."""
        if self.now == self.most:
            return False
        self._num_good += 1
        if self._num_good < self._patience:
            return False
        self.now, self._num_good = min(2 * self.now, self.most), 0
        return True
