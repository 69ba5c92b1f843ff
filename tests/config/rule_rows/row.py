"""A combination of settings, and what must be found of it."""

from __future__ import annotations

from typing import Literal

Level = Literal["error", "warning"]
Row = tuple[str, str, Level, str]
"""Command, flags (`--nproc=N`: in N processes; `--gpu`: on such a device; `--here=N`: on this
host, which has N), level, and the keys that the message must name."""
