"""The game of the recipe `guessing-rl`: find a number from answers that say higher or lower."""

from __future__ import annotations

from hone.envs.session import Action, DataRow

__all__ = ["HigherOrLower"]


class HigherOrLower:
    """A guess is the last character of a turn. The answer is `>` where the number is higher and `<`
    where it is lower. A right guess earns 1; a wrong one in the last turn, or a turn without a
    guess, ends the game with 0."""

    def __init__(self, numbers: str) -> None:
        """`numbers` are the digits to choose from, in ascending order."""
        self.numbers = [*numbers]

    def start(self, row: DataRow) -> None:
        """Choose the number. All samples of a group look for the same one."""
        self.number = self.numbers[row.seed % len(self.numbers)]

    def step(self, action: Action) -> str | float:
        """Answer a guess."""
        guess = action.text[-1:]
        if guess == self.number:
            return 1.0
        if action.must_end or guess not in self.numbers:
            return 0.0
        return ">" if self.number > guess else "<"
