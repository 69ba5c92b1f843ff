"""Finding: a problem that a rule reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Level"]

Level = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem of a run, known before it starts.

    The message says what was got, what is allowed and what to change.
    """

    level: Level
    """An error stops the run before it starts."""
    keys: tuple[str, ...]
    """Every setting that the message names."""
    message: str
