"""A server of the Model Context Protocol over streamable HTTP: a POST for each message, which is
answered by JSON or by a stream of events.

Each request has a connection of its own, so that calls run at the same time. A call has one
deadline for all that it needs: to connect, to send, and each byte of what comes back.
"""

from __future__ import annotations

import io
import itertools
import ssl
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from socket import SOCK_STREAM, getaddrinfo, socket
from time import monotonic
from typing import Any, cast
from urllib.parse import urlsplit

from hone.envs.tools.json_rpc import answer_to_server, encode, id_of_answer, read, result_of
from hone.envs.tools.tool import ToolLostError
from hone.errors import UserError

__all__ = ["HttpConnection"]

_MAX_BYTES = 64 * 2**20
"""Longest message, in bytes."""


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
        is_secret = parts.scheme == "https"
        self._kind = HTTPSConnection if is_secret else HTTPConnection
        self._tls = ssl.create_default_context() if is_secret else None
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._numbers = itertools.count(1)
        self._headers = {
            "Accept": "application/json, text/event-stream",
            "Content-Type": "application/json",
        }

    def request(self, method: str, params: Mapping[str, Any]) -> Any:
        """As `Connection.request`."""
        end = monotonic() + self._deadline_s
        number = next(self._numbers)
        body = encode(method, params, number)
        for message in self._exchange(body, method, end):
            if id_of_answer(message) == number:
                return result_of(message)
            if reply := answer_to_server(message):
                for _ in self._exchange(reply, "a request of its own", end):
                    pass
        raise self._lost(f"did not answer {method}")

    def notify(self, method: str) -> None:
        for _ in self._exchange(encode(method, None), method, monotonic() + self._deadline_s):
            pass

    def agreed(self, protocol_version: str) -> None:
        """Later requests name the version."""
        self._headers["MCP-Protocol-Version"] = protocol_version

    def close(self) -> None:
        """End the server's session."""
        if "Mcp-Session-Id" not in self._headers:
            return
        end = monotonic() + self._deadline_s
        with suppress(OSError, HTTPException), closing(self._connect(end)) as connection:
            connection.request("DELETE", self._target, headers=self._headers)
            connection.getresponse().read(_MAX_BYTES)

    def _exchange(self, body: bytes, what: str, end: float) -> Iterator[dict[str, Any]]:
        """Post a message and read those that come back, up to the monotonic time `end`."""
        try:
            with closing(self._connect(end)) as connection:
                connection.request("POST", self._target, body, self._headers)
                response = connection.getresponse()
                self._require_success(response, what)
                if session := response.getheader("Mcp-Session-Id"):
                    self._headers["Mcp-Session-Id"] = session
                for text in _texts(response):
                    if len(text) > _MAX_BYTES:
                        raise self._lost(f"answered {what} with more than {_MAX_BYTES:,} bytes")
                    yield from read(text)
        except TimeoutError:
            raise self._lost(f"did not answer {what} in {self._deadline_s:g} s") from None
        except (OSError, HTTPException) as error:
            raise self._lost(f"cannot be reached: {error or type(error).__name__}") from error

    def _connect(self, end: float) -> HTTPConnection:
        """A connection whose answers are read up to `end`. Raises TimeoutError and OSError."""
        connection = self._kind(self._host, self._port)
        connection.sock = self._socket(connection.port, end)
        connection.response_class = cast("type[HTTPResponse]", partial(_TimelyResponse, end=end))
        return connection

    def _socket(self, port: int, end: float) -> socket:
        """A connected socket, of the first address of the host that takes it."""
        problem: OSError = OSError(f"{self._host} has no address")
        for family, kind, protocol, _, address in getaddrinfo(self._host, port, type=SOCK_STREAM):
            found = socket(family, kind, protocol)
            try:
                found.settimeout(_left(end))
                found.connect(address)
                found.settimeout(_left(end))
                if self._tls is not None:
                    return self._tls.wrap_socket(found, server_hostname=self._host)
            except OSError as error:
                found.close()
                problem = error
            else:
                return found
        raise problem

    def _require_success(self, response: HTTPResponse, what: str) -> None:
        if not 200 <= response.status < 300:
            text = response.read(500).decode(errors="replace").strip()
            raise self._lost(f"answered {what} with {response.status} {response.reason}: {text}")

    def _lost(self, what: str) -> ToolLostError:
        return ToolLostError(f"the server {self._url} of env.tools {what}")


class _TimelyResponse(HTTPResponse):
    """A response whose every byte comes before a moment. http.client knows deadlines of single
    reads alone, and a server may send one byte after the other for ever."""

    def __init__(self, sock: socket, *args: Any, end: float, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp.close()
        self.fp = io.BufferedReader(_TimelySocket(sock, end))


class _TimelySocket(io.RawIOBase):
    def __init__(self, sock: socket, end: float) -> None:
        self._socket, self._end = sock, end
        self._file = sock.makefile("rb", buffering=0)  # keeps the socket open

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._socket.settimeout(_left(self._end))
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


def _left(end: float) -> float:
    """Seconds until `end`. Raises TimeoutError after it."""
    if (left := end - monotonic()) <= 0:
        raise TimeoutError
    return left


def _texts(response: HTTPResponse) -> Iterator[bytes]:
    """The JSON texts of an answer. Of one that is longer than `_MAX_BYTES` comes the beginning."""
    kind = (response.getheader("Content-Type") or "").partition(";")[0].strip().lower()
    if kind != "text/event-stream":
        chunks, size = list[bytes](), 0
        while size <= _MAX_BYTES and (chunk := response.read1(2**16)):
            chunks.append(chunk)
            size += len(chunk)
        yield b"".join(chunks)
        return
    data, size = list[bytes](), 0
    while line := response.readline(_MAX_BYTES + 1):
        stripped = line.rstrip(b"\r\n")
        if stripped.startswith(b"data:"):
            data.append(stripped.removeprefix(b"data:"))
            size += len(line)
        if data and (not stripped or size > _MAX_BYTES):
            yield b"\n".join(data)
            data, size = [], 0
    if data:
        yield b"\n".join(data)
