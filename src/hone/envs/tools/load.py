"""Loads the tools that `env.tools` names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from hone.envs.tools.mcp import McpServer, is_mcp
from hone.envs.tools.session import ToolSession, require_unique
from hone.envs.tools.tool import Tool, ToolLostError, function_tool
from hone.errors import UserError

__all__ = ["Tools", "make_tools"]


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a run, as a worker has loaded them. Nothing of them runs; each session starts
    the servers anew, so that no episode sees what another one has done."""

    functions: Sequence[Tool]
    servers: Mapping[str, Sequence[Mapping[str, Any]]]
    """The schemas of each server's tools, by its entry in `env.tools`."""
    deadline_s: float

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """The schemas of all tools, as chat templates get them."""
        listed = [schema for schemas in self.servers.values() for schema in schemas]
        return (*(tool.schema for tool in self.functions), *listed)

    def session(
        self,
        own: Sequence[Tool] = (),
        *,
        tool_format: str,
        max_tool_calls: int | None = None,
        max_parallel_calls: int = 8,
    ) -> ToolSession:
        """A session for one episode, with the environment's `own` tools before these.
        `tool_format` is a name of `formats.registry.FORMATS`."""
        servers = {spec: McpServer(spec, deadline_s=self.deadline_s) for spec in self.servers}
        of_servers = [
            tool for spec, server in servers.items() for tool in server.tools(self.servers[spec])
        ]
        return ToolSession(
            [*own, *self.functions, *of_servers],
            tool_format=tool_format,
            max_tool_calls=max_tool_calls,
            max_parallel_calls=max_parallel_calls,
            servers=[*servers.values()],
        )


def make_tools(
    specs: Sequence[str], *, load: Callable[[str], Callable[..., Any]], deadline_s: float = 60.0
) -> Tools:
    """The tools that `env.tools` names. Functions are imported with `load`; servers are started,
    asked for their tools, and ended. `deadline_s` bounds each request to a server, in seconds.

    Raises ValueError (UserError, or that of `load`) for an entry that is no tool, for two tools of
    one name, and for a server that cannot be reached.
    """
    if twice := next((spec for spec in specs if specs.count(spec) > 1), None):
        raise UserError(f"env.tools names '{twice}' twice; remove one")
    functions = [function_tool(_function(spec, load)) for spec in specs if not is_mcp(spec)]
    servers = {spec: _listed(spec, deadline_s) for spec in specs if is_mcp(spec)}
    tools = Tools(functions, servers, deadline_s)
    require_unique([schema["function"]["name"] for schema in tools.schemas])
    return tools


def _function(spec: str, load: Callable[[str], Callable[..., Any]]) -> Callable[..., Any]:
    function = load(spec)
    if isinstance(function, type):
        raise UserError(
            f"env.tools: '{spec}' is a class; name a function. A class whose methods are tools is "
            "an environment, for env.path"
        )
    return function


def _listed(spec: str, deadline_s: float) -> list[dict[str, Any]]:
    try:
        with closing(McpServer(spec, deadline_s=deadline_s)) as server:
            server.start()
            schemas = server.schemas()
    except ToolLostError as error:
        raise UserError(f"env.tools: {error}") from error
    if not schemas:
        raise UserError(f"env.tools: '{spec}' has no tools")
    return schemas
