"""Reward functions and environments that a program passes as objects, by the names that stand for
them in `reward.functions` and `env.path`.

Another process cannot import a function of a notebook or a script. So reward workers are forked
from this process, and have the function already.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["inherited", "inheriting"]

_FUNCTIONS: dict[str, Callable[..., Any]] = {}


def inherited(name: str) -> Callable[..., Any] | None:
    """The function that a name stands for, or None where it is to be imported."""
    return _FUNCTIONS.get(name)


@contextmanager
def inheriting(functions: Mapping[str, Callable[..., Any]]) -> Generator[None]:
    """Register `functions` by name for the duration of the block."""
    _FUNCTIONS.update(functions)
    try:
        yield
    finally:
        for name in functions:
            _FUNCTIONS.pop(name, None)
