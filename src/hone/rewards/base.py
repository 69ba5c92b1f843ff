"""What every reward that ships with hone is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
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

    def settle(self, folder: Path | None) -> Sequence[str]:
        """Get ready in a worker, before the first call. What a call leaves behind belongs into the
        folder, which is removed when the worker ends, however it does. Gives what the user is to be
        warned of, each once a run."""
        return ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


@cache
def compile_regex(pattern: str) -> re.Pattern[str]:
    """Raises ValueError where the text is no regular expression."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from None
