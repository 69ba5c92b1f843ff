"""Whether a Ray cluster can be where `cluster.address` says, before anything is loaded or waited
for: Ray itself tries for half a minute to several, whoever answers."""

from __future__ import annotations

import os
import socket

from hone.config.cluster import host_and_port

__all__ = ["no_cluster", "unreachable"]

_CONNECT_S = 5.0
"""For each address that the host's name has; resolving it is not limited. Enough for two packets
that are lost on the way."""
_ANSWER_S = 10.0
"""How long one who has taken the connection may take to speak."""
_SETTINGS = 4
"""The type of the frame that both sides of HTTP/2 begin with (RFC 9113, 3.4 and 6.5)."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])


def unreachable(address: str) -> str | None:
    """Why no run can join a Ray at `address`, for people; None where one may be.

    Takes what `cluster.address` may be; of `auto` only `RAY_ADDRESS` is looked at.
    """
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
        told = _answer(host, port)
    except (OSError, UnicodeError) as error:
        told = f"nobody answers at port {port} of {host} ({error})"
    return None if told is None else no_cluster(address, source + told)


def no_cluster(address: str, told: str) -> str:
    """The message that there is none, after what was `told` of it."""
    return (
        f"there is no Ray cluster at cluster.address={address!r}: {told.strip().rstrip('.')}. Name "
        "host and port as `ray start --head` prints them (6379 where nothing else was asked for, "
        "after ray:// 10001), or unset cluster.address for a Ray of this host alone."
    )


def _answer(host: str, port: int) -> str | None:
    """What is wrong with who listens there; None for one who speaks gRPC, as all of Ray does.

    Raises OSError where nobody does.
    """
    with socket.create_connection((host, port), _CONNECT_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return None  # what is said is encrypted
        connection.settimeout(_ANSWER_S)
        connection.sendall(_PREFACE)
        header = b""
        while len(header) < 4 and (more := connection.recv(4 - len(header))):
            header += more
    if len(header) == 4 and header[3] == _SETTINGS:
        return None
    return f"who answers at port {port} of {host} does not speak gRPC, as Ray does"
