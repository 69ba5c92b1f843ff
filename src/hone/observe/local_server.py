"""HTTP server for programs and browsers on this machine, with a few paths and its own threads.

    with LocalServer(9100, {"/health": health}, key="log.metrics_port") as server:
        ...

It listens at 127.0.0.1 only, because it has no password; other machines reach it through `ssh -L`.
Requests under other host names, which a foreign page in a browser may use, are refused.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qsl, urlsplit

from hone.errors import UserError

__all__ = ["ADDRESS", "LocalServer", "Reply", "Route"]

ADDRESS = "127.0.0.1"
_NAMES = (ADDRESS, "localhost")
_TIMEOUT_S = 10.0
"""Timeout of each part of a request and of a reply."""
_MAX_OPEN = 64
"""Most open connections. Each takes a file and a thread of a training process."""


class Reply(NamedTuple):
    """The reply of a path."""

    body: bytes
    content_type: str
    status: int = 200


Route = Callable[[Mapping[str, str]], Reply]
"""Handler of a GET request, given the parameters of its query. Called from several threads."""


class LocalServer:
    """Serves `routes` by path until it is closed."""

    def __init__(self, port: int, routes: Mapping[str, Route], *, key: str) -> None:
        """Port 0 takes a free one. Raises UserError, which names `key`, if the port cannot be
        used."""
        if not 0 <= port <= 65535:
            raise UserError(f"{key} is {port}; allowed: 1024 to 65535, or 0 for any that is free.")
        try:
            self._server = _Server((ADDRESS, port), _handler(routes))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            why = "another program has it" if error.errno == errno.EADDRINUSE else error.strerror
            raise UserError(
                f"{key} is {port}, and that port cannot be used ({why}). Choose another, from 1024 "
                "to 65535."
            ) from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, name=f"hone-http-{self.port}", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening. Unfinished replies are not waited for."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lock = threading.Lock()
        self._open: dict[socket.socket, None] = {}
        """Open connections, oldest first."""

    def process_request(self, request: Any, client_address: Any) -> None:
        """Accept a connection. Above `_MAX_OPEN` the oldest one is closed: a proper client has
        finished by then."""
        with self._lock:
            self._open[request] = None
            if len(self._open) > _MAX_OPEN:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):  # it may be closed already
                    oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: a client that disconnects or is too slow is no news."""


def _handler(routes: Mapping[str, Route]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _TIMEOUT_S

        def do_GET(self) -> None:
            reply = self._reply()
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.content_type)
            self.send_header("Content-Length", str(len(reply.body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(reply.body)

        def _reply(self) -> Reply:
            if urlsplit(f"//{self.headers.get('Host', ADDRESS)}").hostname not in _NAMES:
                return Reply(b"ask for localhost\n", "text/plain", 403)
            url = urlsplit(self.path)
            route = routes.get(url.path)
            if route is None:
                known = ", ".join(routes)
                return Reply(f"there is no {url.path}, only {known}\n".encode(), "text/plain", 404)
            return route(dict(parse_qsl(url.query)))

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: the console belongs to the run."""

    return Handler
