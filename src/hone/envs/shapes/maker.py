"""What a shape knows of an environment that it is to play, and what it gives to those who play."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hone.envs.calling import check_args
from hone.envs.session import Session
from hone.envs.tools.session import ToolSession
from hone.envs.tools.tool import Tool

__all__ = ["EnvMaker", "Resolve", "RunTools", "Source"]

Resolve = Callable[[str, str], Any]
"""`resolve(path, what)`: the class or function that `path/to/file.py:Name` or `module:Name` names.
`what` is its kind, for messages. It raises ValueError."""

RunTools = Callable[[Sequence[Tool]], ToolSession]
"""`run_tools(own)`: what runs an environment's own tools and those of `env.tools` in an episode,
with the limits of `env`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvMaker:
    """Makes the sessions of one environment."""

    shape: str
    """Name of the shape, for messages and logs."""
    make: Callable[[], Session]
    """Makes the session of one episode. It may raise whatever the environment raises."""
    make_with_tools: Callable[[RunTools], Session] | None = None
    """The same, of an environment that leaves its tools to hone; None of any other."""
    needs_tool_format: bool = False
    """The environment is played by calls of tools alone, so `Action.tool_calls` must be filled."""
    tools: Sequence[Callable[..., Any]] = ()
    """Python functions that the policy may call."""
    schemas: Sequence[Mapping[str, Any]] = ()
    """Schemas of tools that the environment describes itself."""
    file: str | None = None
    """The file of the environment's code, where errors are looked for; None where it has none."""

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """Descriptions of the tools for the chat template, as JSON schemas.

        Raises ValueError for a function whose types or docstring do not describe it.
        """
        return [*map(dict, self.schemas), *_described(self.tools)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An environment that a path names, before it is played."""

    path: str
    found: Callable[..., Any]
    """The class, or the function that makes an environment."""
    args: Mapping[str, Any]
    """Keyword arguments of `found`."""
    type: type
    """The class, or the class of what the function makes."""
    resolve: Resolve

    def create(self) -> Any:
        """A new environment. Raises whatever its code raises."""
        return self.found(**self.args)

    def probe(self) -> Any:
        """An environment to look at, before an episode. Raises ValueError where none is made."""
        return probe(self.path, self.found, self.args)

    @property
    def file(self) -> str | None:
        """The file in which the class is written."""
        return getattr(sys.modules.get(self.type.__module__), "__file__", None)


def probe(path: str, found: Callable[..., Any], args: Mapping[str, Any]) -> Any:
    """What `found` makes of `args`. Raises ValueError where it cannot be made."""
    check_args(path, found, args)
    try:
        return found(**args)
    except (Exception, SystemExit) as error:  # foreign code may raise anything
        raise ValueError(f"making '{path}' failed: {type(error).__name__}: {error}") from error


def _described(tools: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    if not tools:
        return []
    from hone.envs.tools.schema import function_schema

    return [function_schema(tool) for tool in tools]
