"""Tools of servers of the Model Context Protocol (modelcontextprotocol.io), over standard input and
output or streamable HTTP.

The client is our own: it needs three requests (`initialize`, `tools/list`, `tools/call`), and the
official package brings a web server and nearly thirty packages. Calls block, and
are made from threads; several may be under way at once.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from hone.envs.tools.mcp_http import HttpConnection
from hone.envs.tools.mcp_stdio import StdioConnection
from hone.envs.tools.tool import Tool, ToolError, ToolLostError
from hone.errors import UserError
from hone.version import __version__

__all__ = ["McpServer", "is_mcp"]

PREFIX = "mcp:"
PROTOCOL_VERSION = "2025-06-18"
"""The version that is asked for; a server answers with one that it has."""
_MAX_PAGES = 1000


class Connection(Protocol):
    """A way to reach a server."""

    def request(self, method: str, params: Mapping[str, Any]) -> Any:
        """The result of a request. Raises ToolError for an error that the server answers, and
        ToolLostError where it gives no answer."""
        ...

    def notify(self, method: str) -> None: ...

    def agreed(self, protocol_version: str) -> None:
        """Take note of the version of the protocol that the server speaks."""
        ...

    def close(self) -> None: ...


def is_mcp(spec: str) -> bool:
    """Whether an entry of `env.tools` names a server."""
    return spec.startswith(PREFIX)


class McpServer:
    """A server, `mcp:COMMAND ARGS` or `mcp:http(s)://...`, between `start` and `close`."""

    def __init__(self, spec: str, *, deadline_s: float) -> None:
        """`deadline_s` bounds each request, in seconds. Raises UserError for a spec without command
        or URL."""
        self.spec = spec
        self._deadline_s = deadline_s
        self._connection: Connection | None = None
        target = spec.removeprefix(PREFIX).strip()
        self._url = target if target.startswith(("http://", "https://")) else ""
        try:
            self._command = [] if self._url else shlex.split(target)
        except ValueError as error:
            raise UserError(f"env.tools: '{spec}' is no command of a shell: {error}") from None
        if not self._url and not self._command:
            raise UserError(
                f"env.tools: '{spec}' names no server; write `mcp:COMMAND ARGUMENTS`, or "
                "`mcp:http://HOST:PORT/mcp`"
            )

    def start(self) -> None:
        """Start or reach the server, and introduce the client. Raises ToolLostError."""
        self._connection = (
            HttpConnection(self._url, deadline_s=self._deadline_s)
            if self._url
            else StdioConnection(self._command, deadline_s=self._deadline_s)
        )
        try:
            hello: Any = self._connection.request(
                "initialize",
                {
                    "protocolVersion": PROTOCOL_VERSION,
                    "capabilities": {},
                    "clientInfo": {"name": "hone", "version": __version__},
                },
            )
            version = hello.get("protocolVersion") if isinstance(hello, dict) else None
            if not isinstance(version, str):
                raise ToolLostError(f"{self.spec} answered `initialize` with {hello!r:.200}")
            self._connection.agreed(version)
            self._connection.notify("notifications/initialized")
        except ToolError as error:
            self.close()
            raise ToolLostError(f"{self.spec} refused `initialize`: {error}") from error
        except ToolLostError:
            self.close()
            raise

    def schemas(self) -> list[dict[str, Any]]:
        """The schemas of its tools, as chat templates get them. Raises ToolLostError."""
        schemas: list[dict[str, Any]] = []
        params: dict[str, Any] = {}
        for _ in range(_MAX_PAGES):
            try:
                page = self._reached().request("tools/list", params)
            except ToolError as error:
                raise ToolLostError(f"{self.spec} refused `tools/list`: {error}") from error
            if not isinstance(page, dict) or not isinstance(page.get("tools"), list):
                raise ToolLostError(f"{self.spec} answered `tools/list` with {page!r:.200}")
            schemas += [_function(entry, self.spec) for entry in page["tools"]]
            if not (cursor := page.get("nextCursor")):
                return schemas
            params = {"cursor": cursor}
        raise ToolLostError(f"{self.spec} gave more than {_MAX_PAGES} pages of tools")

    def tools(self, schemas: Sequence[Mapping[str, Any]]) -> list[Tool]:
        """Its tools, which can be called once it is started."""
        return [Tool(schema, partial(self._call, schema["function"]["name"])) for schema in schemas]

    def close(self) -> None:
        """End the server's process or session; nothing where it is not started."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _call(self, tool: str, /, **arguments: Any) -> str:
        """Call a tool. Raises ToolError with what the server says of a failed call."""
        result = self._reached().request("tools/call", {"name": tool, "arguments": arguments})
        if not isinstance(result, dict):
            raise ToolLostError(f"{self.spec} answered a call of '{tool}' with {result!r:.200}")
        text = _text_of(result)
        if result.get("isError"):
            raise ToolError(json.dumps({"error": text}, ensure_ascii=False))
        return text

    def _reached(self) -> Connection:
        if self._connection is None:
            raise ToolLostError(f"{self.spec} is not running")
        return self._connection


def _function(entry: Any, spec: str) -> dict[str, Any]:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise ToolLostError(f"{spec} lists {entry!r:.200}, which is no tool")
    parameters = entry.get("inputSchema")
    return {
        "type": "function",
        "function": {
            "name": entry["name"],
            "description": entry.get("description") or "",
            "parameters": parameters
            if isinstance(parameters, dict)
            else {"type": "object", "properties": {}},
        },
    }


def _text_of(result: Mapping[str, Any]) -> str:
    """The text of a result. What is no text, such as an image, is named in it."""
    content = result.get("content")
    parts = [_part(part) for part in content] if isinstance(content, list) else []
    if not parts and "structuredContent" in result:
        return json.dumps(result["structuredContent"], ensure_ascii=False)
    return "\n".join(parts)


def _part(part: Any) -> str:
    if not isinstance(part, dict):
        return json.dumps(part, ensure_ascii=False)
    kind = part.get("type")
    if kind == "text":
        return str(part.get("text", ""))
    resource = part.get("resource")
    if kind == "resource" and isinstance(resource, dict) and isinstance(resource.get("text"), str):
        return resource["text"]
    if kind == "resource_link":
        return f"[{part.get('name') or 'resource'}: {part.get('uri')}]"
    return f"[{kind or 'content'} of type {part.get('mimeType') or 'unknown'}, not shown]"
