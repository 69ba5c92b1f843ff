"""What a check has to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hone.config.base import Section

__all__ = ["Finding", "differs", "error", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem of a configuration.

    The message names every key of `keys`: what was got, what is allowed, what to change.
    """

    level: Literal["error", "warning"]
    """An error stops the run before it starts."""
    keys: tuple[str, ...]
    message: str


def error(message: str, *keys: str) -> Finding:
    """A finding that stops the run."""
    return Finding("error", keys, message)


def warning(message: str, *keys: str) -> Finding:
    """A finding that is told."""
    return Finding("warning", keys, message)


def differs(section: Section, *names: str) -> list[str]:
    """Which of these fields have another value than their default, that is, were meant."""
    defaults = type(section).model_fields
    return [
        name
        for name in names
        if getattr(section, name)
        != defaults[name].get_default(call_default_factory=True, validated_data={})
    ]
