"""The base class of built-in rewards, and the error of rewards that call a service."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hone.config.base import Section
from hone.types import FailureKind

__all__ = ["Builtin", "ServiceError", "compile_regex"]


class Builtin(Section):
    """A reward function with its settings; subclasses define `__call__`."""

    @property
    def isolated(self) -> bool:
        """Whether it must run in a worker process."""
        return False

    def check_limit(self, max_completion_tokens: int) -> None:
        """Raise ValueError where the settings contradict the longest completion."""

    def limit_time(self, timeout_s: float) -> None:
        """Set the time after which a call is killed; called before the first call."""

    def settle(self, folder: Path | None) -> Sequence[str]:
        """Prepare for calls in a worker; called before the first call. Files of calls must be in
        `folder`, which is removed however the worker ends. Returns warnings for the user, each of
        which is shown once a run."""
        return ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class ServiceError(Exception):
    """A service has not answered, or has refused; the text says which and why."""

    def __init__(self, message: str, kind: FailureKind = FailureKind.EXCEPTION) -> None:
        super().__init__(message)
        self.kind = kind


@cache
def compile_regex(pattern: str) -> re.Pattern[str]:
    """The compiled pattern. Raises ValueError for an invalid regular expression."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from None
