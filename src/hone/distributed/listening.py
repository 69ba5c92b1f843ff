"""Sockets that other processes of a run connect to, at one address and no other."""

from __future__ import annotations

import socket

__all__ = ["listen"]

_BACKLOG = 4096
"""Connections that may wait to be accepted: a thousand engines connect at the same moment."""


def listen(host: str) -> socket.socket:
    """Listen at a free port of the address that `host` names, and at no other interface.

    `host` is the name or address by which the run's other processes reach this machine. Raises
    OSError, with what to change, where it is not an address of this machine.
    """
    try:
        family, *_, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place, family=family, backlog=_BACKLOG)
    except OSError as error:
        raise OSError(
            error.errno,
            f"no port can be opened at {host} ({error.strerror}). Other processes of "
            "the run reach this machine by that name, so it has to resolve to an address of it "
            "here too.",
        ) from error
