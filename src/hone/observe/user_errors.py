"""Errors that a user can mend, and their messages, for the command line and for Python programs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from hone.errors import UserError
from hone.observe.caches import unwritten

__all__ = ["raises_user_errors", "user_message"]

P = ParamSpec("P")
R = TypeVar("R")


def user_message(error: Exception) -> str | None:
    """The message of an error that a user can mend; None for an internal error. Other errors than
    UserError may be either, so that their message says how to see the traceback."""
    text = unwritten(error)
    if text is None and not isinstance(error, ValueError | OSError):
        return None
    where = "" if isinstance(error, UserError) else "\n(HONE_TRACEBACK=1 shows where)"
    return f"{error if text is None else text}{where}"


def raises_user_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator that turns users' errors into a UserError without the traceback behind it."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:  # libraries raise errors of their own for a full cache
            message = None if os.environ.get("HONE_TRACEBACK") else user_message(error)
            if message is None:
                raise
        raise UserError(message)

    return call
