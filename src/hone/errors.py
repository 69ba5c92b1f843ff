"""The error that a user can cause, and what its message is made of."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

__all__ = ["UserError", "did_you_mean", "listed"]


class UserError(ValueError):
    """A mistake in what the user gave: the text says what was got, what is allowed, what to change.

    The command line prints it without a traceback and exits with 2.
    """


def did_you_mean(name: str, known: Collection[str]) -> str:
    """A sentence that names the nearest of `known`, with a blank before it, or nothing."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean '{near[0]}'?" if near else ""


def listed(words: Sequence[str], *, last: str = "and") -> str:
    """The words as a sentence lists them: `a, b and c`, with `last` before the last one."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"
