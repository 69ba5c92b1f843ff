"""The tool of the recipe `calculator-rl`."""

from __future__ import annotations

__all__ = ["multiply"]


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number
        b: The second number
    """
    return a * b
