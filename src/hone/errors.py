"""The error a user can cause."""

from __future__ import annotations

__all__ = ["UserError"]


class UserError(ValueError):
    """A mistake in what the user gave: the text says what was got, what is allowed, what to change.

    The command line prints it without a traceback and exits with 2.
    """
