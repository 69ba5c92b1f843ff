"""The environments of the recipes `calculator-rl` and `guessing-rl` as TRL's users write them:
classes with `reset`, tools as methods, and perhaps `get_reward`."""

from __future__ import annotations

import random

__all__ = ["CALLS", "Calculator", "Guessing"]

NUMBERS = "1234567"
CALLS = [f"[guess(number={number})]" for number in NUMBERS]
"""Every call of `Guessing.guess` that there is: one token each, as random weights spell nothing."""


class Calculator:
    """The tool of `calculator-rl`. The right number in the last turn is scored by
    `reward.functions`, since an environment of TRL sees calls alone."""

    def reset(self, **columns: object) -> None:
        """Nothing is kept."""

    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers.

        Args:
            a: The first number
            b: The second number
        """
        return a * b


class Guessing:
    """The game of `guessing-rl`: each guess is a call, and three count."""

    def reset(self, game: int, **columns: object) -> None:
        """`game` is a column of the row, since TRL gives an environment no seed."""
        self.number = random.Random(game).choice(NUMBERS)
        self.left, self.won = 3, False

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess
        """
        if self.won or not self.left:
            return "="
        self.left -= 1
        self.won = str(number) == self.number
        return "=" if self.won else ">" if self.number > str(number) else "<"

    def get_reward(self) -> float:
        """1 where the number was found."""
        return float(self.won)
