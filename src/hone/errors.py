"""The error for users' mistakes, and helpers for its messages."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

__all__ = ["UserError", "did_you_mean", "listed"]


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
