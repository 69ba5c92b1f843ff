"""Reads values mark by mark, for formats whose values are no JSON."""

from __future__ import annotations

import math
import re

from hone.envs.tools.formats.found import Malformed, skip_space

__all__ = ["MAX_DEPTH", "NUMBER", "Scanner", "number"]

MAX_DEPTH = 50
"""Most levels of lists and objects in an argument."""
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


class Scanner:
    """A place in a text. Methods that read something raise Malformed where it is not there."""

    def __init__(self, text: str, position: int) -> None:
        self.text = text
        self.position = position

    def peek(self) -> str:
        """The next character that is no whitespace; empty at the end."""
        self.position = skip_space(self.text, self.position)
        return self.text[self.position : self.position + 1]

    def take(self, mark: str) -> None:
        """Go past a character."""
        if self.peek() != mark:
            raise self.expected(f"`{mark}`")
        self.position += 1

    def separated(self, closer: str) -> None:
        """Go past a comma, or stay at `closer`."""
        if self.peek() == ",":
            self.position += 1
        elif self.peek() != closer:
            raise self.expected(f"`,` or `{closer}`")

    def expected(self, what: str) -> Malformed:
        """An error which says that `what` is missing at this place."""
        if not (rest := self.text[self.position :][:20]):
            return Malformed("the turn ends before the call is complete")
        return Malformed(f"instead of {what} stands `{rest}`")

    def require_shallow(self, depth: int) -> None:
        """Refuse a value within `depth` others."""
        if depth > MAX_DEPTH:
            raise Malformed(f"an argument has more than {MAX_DEPTH} levels")


def number(text: str) -> int | float:
    """The number that a text matching `NUMBER` is. Raises Malformed for one that is too large."""
    try:
        value = int(text) if text.lstrip("+-").isdigit() else float(text)
    except ValueError:
        raise Malformed(f"{text[:20]} is too large") from None
    if not math.isfinite(value):
        raise Malformed(f"{text[:20]} is too large")
    return value
