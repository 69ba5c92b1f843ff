"""A tool: a schema for the chat template, and what is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hone.envs.tools.schema import function_schema

__all__ = ["Tool", "ToolError", "ToolLostError", "function_tool"]


class ToolError(Exception):
    """A tool could not do what it was asked for. The text is the whole answer to the policy."""


class ToolLostError(RuntimeError):
    """A tool cannot answer, and not because of what it was asked for: its server has ended, or its
    sandbox is gone. The episode is played again. A tool may raise it; every other exception is its
    answer to the policy."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the policy may call."""

    schema: Mapping[str, Any]
    """`{"type": "function", "function": {"name", "description", "parameters"}}`."""
    function: Callable[..., Any]
    """Called with the arguments by name, in a thread or, where it is `async`, on the event loop."""

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The schema of the arguments."""
        return self.schema["function"].get("parameters") or {}


def function_tool(function: Callable[..., Any]) -> Tool:
    """A function or bound method as a tool. Raises UserError where it lacks types or a
    docstring."""
    return Tool(function_schema(function), function)
