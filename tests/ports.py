"""Ports for servers that a test starts, without a race."""

from __future__ import annotations

import socket
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Generator[int]:
    """A port of this host that no other program is given meanwhile.

    Linux lets a server listen there that sets SO_REUSEADDR, as torch's stores and Python's HTTP
    servers do: this socket has set it too, and does not listen.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
