"""What every reward that ships with hone is."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from hone.config.base import Section

__all__ = ["Builtin", "compile_regex"]


class Builtin(Section):
    """A reward function with its settings; subclasses define `__call__`."""

    @property
    def isolated(self) -> bool:
        """Must run in a worker process."""
        return False

    def check_limit(self, max_completion_tokens: int) -> None:
        """Raise ValueError where the settings contradict the longest completion."""

    def limit_time(self, timeout_s: float) -> None:
        """Told before the first call: after so many seconds a call is ended from outside."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


@cache
def compile_regex(pattern: str) -> re.Pattern[str]:
    """Raises ValueError where the text is no regular expression."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from None
