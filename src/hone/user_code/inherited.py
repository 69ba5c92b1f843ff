"""Reward functions and environments that a program has given as they are, by the names they have
in `reward.functions` and `env.path`.

A function of a notebook or a script cannot be imported by another process. Reward workers are
forked from this process instead, and so have it already.
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
    """Inside, these names stand for these functions."""
    _FUNCTIONS.update(functions)
    try:
        yield
    finally:
        for name in functions:
            _FUNCTIONS.pop(name, None)
