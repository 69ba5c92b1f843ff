"""Evaluates tests of a shell script: `[ ... ]`, `[[ ... ]]`, a pattern of `case`.

None stands for a result that only a run could tell: tests of files, of the output of commands.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

__all__ = ["Truth", "both", "either", "holds", "is_known", "matches", "opposite"]

Truth = bool | None


def is_known(text: str) -> bool:
    """Whether all of a word is known without a run."""
    return "$" not in text and "`" not in text


def opposite(truth: Truth) -> Truth:
    """The result of `!` before a command."""
    return None if truth is None else not truth


def both(one: Truth, other: Truth) -> Truth:
    """The result of `&&`: false if one side is, even if the other is unknown."""
    return False if one is False or other is False else None if None in (one, other) else True


def either(one: Truth, other: Truth) -> Truth:
    """The result of `||`: true if one side is, even if the other is unknown."""
    return opposite(both(opposite(one), opposite(other)))


def matches(text: str, pattern: str) -> Truth:
    """Whether a pattern, as in `case`, matches the whole text."""
    return fnmatchcase(text, pattern) if is_known(text + pattern) else None


def _number(compare: Callable[[int, int], bool]) -> Callable[[str, str], Truth]:
    return lambda left, right: compare(int(left), int(right))


_OF_TWO: Mapping[str, Callable[[str, str], Truth]] = {
    "=": matches,
    "==": matches,
    "!=": lambda left, right: opposite(matches(left, right)),
    "=~": lambda left, right: re.search(right, left) is not None,
    "<": operator.lt,
    ">": operator.gt,
    "-eq": _number(operator.eq),
    "-ne": _number(operator.ne),
    "-lt": _number(operator.lt),
    "-le": _number(operator.le),
    "-gt": _number(operator.gt),
    "-ge": _number(operator.ge),
}
_OF_ONE: Mapping[str, Callable[[str], Truth]] = {
    "-z": lambda text: not text,
    "-n": bool,
}


def holds(words: Sequence[str]) -> Truth:
    """Whether a test holds, given the words between its brackets."""
    test = _Test(words)
    try:
        truth = test.any()
    except (IndexError, ValueError, re.error):
        return None
    return truth if test.at == len(words) else None


class _Test:
    """Parser of a test; `||` binds less than `&&`."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words
        self.at = 0

    def any(self) -> Truth:
        truth = self.all()
        while self._takes("||", "-o"):
            truth = either(truth, self.all())
        return truth

    def all(self) -> Truth:
        truth = self.one()
        while self._takes("&&", "-a"):
            truth = both(truth, self.one())
        return truth

    def one(self) -> Truth:
        if self._takes("!"):
            return opposite(self.one())
        if self._takes("("):
            truth = self.any()
            self.at += 1  # the bracket that closes
            return truth
        left, *rest = self.words[self.at : self.at + 3]
        if len(rest) == 2 and rest[0] in _OF_TWO:
            self.at += 3
            return _OF_TWO[rest[0]](left, rest[1]) if is_known(left + rest[1]) else None
        if re.fullmatch(r"-[a-zA-Z]", left) and rest:
            self.at += 2
            test = _OF_ONE.get(left)
            return test(rest[0]) if test and is_known(rest[0]) else None
        self.at += 1
        return bool(left) if is_known(left) else None

    def _takes(self, *words: str) -> bool:
        is_next = self.at < len(self.words) and self.words[self.at] in words
        self.at += is_next
        return is_next
