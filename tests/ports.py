"""Ports for servers that a test starts, without a race, and those that a process has opened."""

from __future__ import annotations

import socket
from collections.abc import Generator
from contextlib import contextmanager

import psutil


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


def listening(process: psutil.Process | None = None) -> set[tuple[str, int]]:
    """Addresses and ports at which a process listens; None: this one."""
    return {
        (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
        for connection in (process or psutil.Process()).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
