"""Quick check that a Ray cluster can be at `cluster.address`, before anything is loaded. Ray itself
tries for half a minute to several."""

from __future__ import annotations

import os
import socket

from hone.distributed.settings import host_and_port

__all__ = ["no_cluster", "unreachable"]

_CONNECT_S = 5.0
"""Timeout of a connection to each address of the host's name; name resolution is not limited.
Enough for two lost packets."""


def unreachable(address: str) -> str | None:
    """Reason why no run can join a Ray cluster at `address`, or None if one may be there. `address`
    is a value of `cluster.address`; for `auto` only `RAY_ADDRESS` is checked."""
    meant, source = address, ""
    if address == "auto":
        meant = os.environ.get("RAY_ADDRESS", "")
        if meant in ("", "auto"):
            return None
        source = f"RAY_ADDRESS, which auto reads, is {meant!r}, and "
    if (place := host_and_port(meant)) is None:
        return no_cluster(address, f"{source}{meant!r} is neither host:port nor ray://host:port")
    host, port = place
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except (OSError, UnicodeError) as error:
        return no_cluster(address, f"{source}nobody answers at port {port} of {host} ({error})")
    return None


def no_cluster(address: str, reason: str) -> str:
    """Error message for a cluster that cannot be reached."""
    return (
        f"there is no Ray cluster at cluster.address={address!r}: {reason.strip().rstrip('.')}. "
        "Name host and port as `ray start --head` prints them (6379 where nothing else was asked "
        "for, after ray:// 10001), or unset cluster.address for a Ray of this host alone."
    )
