"""The HTTP server: uvicorn in a thread of its own, at one address.

with DoorServer(door) as server:
    print(server.url)
    handover.serve(runner)

The settings are those of `door.cfg`, which code may make: `DoorConfig()` listens at a free port of
loopback, and the key of the server is drawn (`door.keys.key`).
"""

from __future__ import annotations

import asyncio
import threading
from typing import Self

import uvicorn

from hone.distributed.listening import listen
from hone.door.app import make_app
from hone.door.door import Door
from hone.errors import UserError

__all__ = ["DoorServer"]

_MORE_CONNECTIONS = 256
"""Connections beyond those of requests and sessions that may be open; uvicorn answers others with
status 503."""
_END_S = 5
"""Longest wait for answers that are under way when the server ends."""


class DoorServer:
    """Serves a door until it is closed."""

    def __init__(self, door: Door) -> None:
        """Listen at `serve.host` and `serve.port`. Raises UserError where that is not possible."""
        cfg = door.cfg
        try:
            self._socket = listen(cfg.host, cfg.port)
        except OSError as error:
            raise UserError(
                f"the server cannot listen at serve.host={cfg.host!r} and serve.port={cfg.port}: "
                f"{error.strerror}. Choose an address of this machine, and a port that is free (0 "
                "takes any)"
            ) from error
        self._door = door
        self.port: int = self._socket.getsockname()[1]
        host = f"[{cfg.host}]" if ":" in cfg.host else cfg.host
        self.url = f"http://{host}:{self.port}"
        self._server = uvicorn.Server(
            uvicorn.Config(
                make_app(door),
                log_config=None,  # which would log to stdout; nothing of a request is logged
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                limit_concurrency=cfg.max_requests + cfg.max_sessions + _MORE_CONNECTIONS,
                timeout_graceful_shutdown=_END_S,
            )
        )
        self._has_loop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hone-door", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._has_loop.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening. Answers that are under way have a moment to be sent."""
        self._server.should_exit = True
        if self._thread.ident is not None:  # it was started
            self._thread.join()
        self._socket.close()
        self._door.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        finally:
            self._has_loop.set()
            self._door.loop_calls.detach()

    async def _serve(self) -> None:
        self._door.loop_calls.attach(asyncio.get_running_loop())
        self._has_loop.set()
        await self._server.serve(sockets=[self._socket])
