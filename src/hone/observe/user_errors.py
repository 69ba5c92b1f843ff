"""What a program that calls hone is told of its mistakes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from hone.errors import UserError
from hone.observe.caches import unwritten

__all__ = ["raises_user_errors"]

P = ParamSpec("P")
R = TypeVar("R")


def raises_user_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator that turns users' errors into a UserError without the traceback behind it."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            told = unwritten(error)
            if os.environ.get("HONE_TRACEBACK"):
                raise
            if told is None and not isinstance(error, ValueError | OSError):
                raise
            text = told or str(error)
            if not isinstance(error, UserError):
                text += "\n(HONE_TRACEBACK=1 shows where)"
        raise UserError(text)

    return call
