"""The error for users' mistakes, and helpers for its messages."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable, Collection, Sequence
from typing import ParamSpec, TypeVar

__all__ = ["UserError", "did_you_mean", "listed", "raises_user_errors"]

P = ParamSpec("P")
R = TypeVar("R")


class UserError(ValueError):
    """A mistake of the user. The text says what was got, what is allowed and what to change.

    The command line prints it without a traceback and exits with 2.
    """


def did_you_mean(name: str, known: Collection[str]) -> str:
    """A sentence with the nearest of `known`, after a blank; an empty text where none is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean '{near[0]}'?" if near else ""


def listed(words: Sequence[str], *, last: str = "and") -> str:
    """The words as a sentence lists them: `a, b and c`, with `last` before the last one."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


def raises_user_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator that turns users' errors into a UserError without the traceback behind it."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (ValueError, OSError) as error:
            if os.environ.get("HONE_TRACEBACK"):
                raise
            text = str(error)
            if not isinstance(error, UserError):
                text += "\n(HONE_TRACEBACK=1 shows where)"
        raise UserError(text)

    return call
