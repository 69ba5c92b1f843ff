"""Sockets that other processes of a run connect to, at one address and no other."""

from __future__ import annotations

import socket

__all__ = ["listen"]


def listen(host: str, *, backlog: int = 4096) -> socket.socket:
    """Listen at a free port of the address that `host` names, and at no other interface.

    `host` is the name or address by which the run's other processes reach this machine. Raises
    OSError, with what to change, where it is not an address of this machine.
    """
    *_, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    family = socket.AF_INET6 if len(place) == 4 else socket.AF_INET
    try:
        return socket.create_server(place, family=family, backlog=backlog)
    except OSError as error:
        raise OSError(
            error.errno,
            f"no port can be opened at {host} ({place[0]}): {error.strerror}. Other processes of "
            "the run reach this machine by that name, so it has to resolve to an address of it "
            "here too.",
        ) from error
