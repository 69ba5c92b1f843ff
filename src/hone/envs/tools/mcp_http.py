"""A server of the Model Context Protocol over streamable HTTP: a POST for each message, which is
answered by JSON or by a stream of events.

Each request has a connection of its own, so that calls run at the same time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from socket import socket
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from hone.envs.tools.json_rpc import answer_to_server, encode, id_of_answer, read, result_of
from hone.envs.tools.tool import ToolLostError
from hone.errors import UserError

__all__ = ["HttpConnection"]

_MAX_LINE = 64 * 2**20
"""Longest line of an event stream, in bytes: a message is one line."""


class HttpConnection:
    """Speaks with the server at a URL. The server's session, where it has one, ends with
    `close`."""

    def __init__(self, url: str, *, deadline_s: float) -> None:
        """Raises UserError for a URL without host, or with a port that is no number."""
        self._url = url
        self._deadline_s = deadline_s
        parts = urlsplit(url)
        try:
            self._port = parts.port
        except ValueError as error:
            raise UserError(f"env.tools: the URL '{url}': {error}") from None
        if not parts.hostname:
            raise UserError(f"env.tools: the URL '{url}' names no host")
        self._host = parts.hostname
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._numbers = itertools.count(1)
        self._headers = {
            "Accept": "application/json, text/event-stream",
            "Content-Type": "application/json",
        }

    def request(self, method: str, params: Mapping[str, Any]) -> Any:
        """As `Connection.request`."""
        number = next(self._numbers)
        body = encode(method, params, number)
        for message in self._exchange(body, method):
            if id_of_answer(message) == number:
                return result_of(message)
            if reply := answer_to_server(message):
                for _ in self._exchange(reply, "a request of its own"):
                    pass
        raise self._lost(f"did not answer {method}")

    def notify(self, method: str) -> None:
        for _ in self._exchange(encode(method, None), method):
            pass

    def agreed(self, protocol_version: str) -> None:
        """Later requests name the version."""
        self._headers["MCP-Protocol-Version"] = protocol_version

    def close(self) -> None:
        """End the server's session."""
        if "Mcp-Session-Id" not in self._headers:
            return
        with suppress(OSError, HTTPException), closing(self._connect()) as connection:
            connection.request("DELETE", self._target, headers=self._headers)
            connection.getresponse().read()

    def _exchange(self, body: bytes, what: str) -> Iterator[dict[str, Any]]:
        """Post a message and read those that come back, up to the deadline."""
        end = monotonic() + self._deadline_s
        try:
            with closing(self._connect()) as connection:
                connection.request("POST", self._target, body, self._headers)
                sock = connection.sock
                response = connection.getresponse()
                self._require_success(response, what)
                if session := response.getheader("Mcp-Session-Id"):
                    self._headers["Mcp-Session-Id"] = session
                for text in _texts(sock, response, end):
                    yield from read(text)
        except TimeoutError:
            raise self._lost(f"did not answer {what} in {self._deadline_s:g} s") from None
        except (OSError, HTTPException) as error:
            raise self._lost(f"cannot be reached: {error or type(error).__name__}") from error

    def _connect(self) -> HTTPConnection:
        return self._kind(self._host, self._port, timeout=self._deadline_s)

    def _require_success(self, response: HTTPResponse, what: str) -> None:
        if not 200 <= response.status < 300:
            text = response.read(500).decode(errors="replace").strip()
            raise self._lost(f"answered {what} with {response.status} {response.reason}: {text}")

    def _lost(self, what: str) -> ToolLostError:
        return ToolLostError(f"the server {self._url} of env.tools {what}")


def _texts(sock: socket, response: HTTPResponse, end: float) -> Iterator[bytes]:
    """The JSON texts of an answer. Raises TimeoutError at the monotonic time `end`."""
    kind = (response.getheader("Content-Type") or "").partition(";")[0].strip().lower()
    if kind != "text/event-stream":
        chunks: list[bytes] = []
        while chunk := _timely(sock, response, end).read1(2**16):
            chunks.append(chunk)
        yield b"".join(chunks)
        return
    data: list[bytes] = []
    while line := _timely(sock, response, end).readline(_MAX_LINE):
        if stripped := line.rstrip(b"\r\n"):
            if stripped.startswith(b"data:"):
                data.append(stripped.removeprefix(b"data:"))
        elif data:
            yield b"\n".join(data)
            data = []
    if data:
        yield b"\n".join(data)


def _timely(sock: socket, response: HTTPResponse, end: float) -> HTTPResponse:
    """The response, whose next read takes until `end` at most. Raises TimeoutError after it."""
    if (left := end - monotonic()) <= 0:
        raise TimeoutError
    sock.settimeout(left)
    return response
