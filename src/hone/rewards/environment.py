"""What the driver and the workers know of a run's environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["EnvFacts", "EnvSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """The environment of `env`."""

    path: str | None
    args: dict[str, Any]
    tools: tuple[str, ...] = ()
    tool_format: str | None = None
    """The name of the format of calls. None where the environment needs none, or where it is loaded
    only to be described."""
    max_tool_calls: int | None = None
    max_parallel_calls: int = 8
    timeout_s: float
    """Deadline of one call of a session."""
    max_sessions: int
    """Most sessions that are held at a time."""
    command: str | None = None
    """The program that plays an episode (`env.harness.command`)."""

    @property
    def described(self) -> str:
        """The keys with what they name, for messages."""
        path = f"env.path ({self.path})" if self.path is not None else ""
        tools = f"env.tools ({', '.join(self.tools)})" if self.tools else ""
        command = f"env.harness.command ({self.command})" if self.command is not None else ""
        return " and ".join(filter(None, (path, tools, command)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvFacts:
    """What an environment is, as a worker has found it."""

    shape: str
    """`stateless`, `tools`, `harness`, or the name of the shape of its sessions."""
    has_sessions: bool
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas of the tools that the policy may call."""
    needs_tool_format: bool = False
    """Calls of tools must be read from the turns."""
