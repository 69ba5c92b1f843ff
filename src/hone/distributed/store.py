"""The key-value store of the rendezvous."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from functools import cache

import torch.distributed as dist

from hone.distributed.listening import host_store
from hone.distributed.processes import Processes, Rendezvous, rendezvous
from hone.errors import UserError

__all__ = ["CONNECT_S", "LostPeerError", "UnreachableError", "connect", "prefixed"]

CONNECT_S = 60.0
"""Timeout of a request to the store."""
_REFUSED_S = 5.0
"""How long the store of a launcher may refuse connections. It is started before any process."""


class LostPeerError(ConnectionError):
    """Raised when another process is gone or did not arrive."""


class UnreachableError(LostPeerError):
    """Raised when the rendezvous store is gone or was never there."""


def connect(own: Processes) -> dist.Store:
    """Connect to this module's part of the launcher's store. Without a launcher the first process
    serves the store until it ends.

    Raises UnreachableError if nobody answers, and UserError if its address is not set or is not one
    of the first process's.
    """
    place = rendezvous()
    if own.rank == 0 and not place.has_server:
        _serve(place.host, place.port)
    _await_server(place)
    try:
        store = dist.TCPStore(place.host, place.port, timeout=timedelta(seconds=CONNECT_S))
    except dist.DistError as error:
        raise UnreachableError(_unanswered(place, error)) from error
    return prefixed(store, place.attempt)


@cache
def _serve(host: str, port: int) -> dist.TCPStore:
    """Serve a store in the first process, at an address of its machine."""
    try:
        return host_store(host, port, timeout_s=CONNECT_S)
    except OSError as error:
        raise UserError(
            f"the first process cannot serve a store at MASTER_ADDR and MASTER_PORT: {error}"
        ) from error


def _await_server(place: Rendezvous) -> None:
    """Wait until a server listens. torch would try for twice as long and report each failure in
    fifty lines."""
    began_s = time.monotonic()
    while True:
        try:
            socket.create_connection((place.host, place.port), CONNECT_S).close()
            return
        except OSError as error:
            is_refused = place.has_server and isinstance(error, ConnectionRefusedError)
            if time.monotonic() - began_s > (_REFUSED_S if is_refused else CONNECT_S):
                raise UnreachableError(_unanswered(place, error)) from error
        time.sleep(0.2)


def _unanswered(place: Rendezvous, error: Exception) -> str:
    return (
        f"{socket.gethostname()} gets no answer at {place.host}:{place.port}, where the processes "
        f"of this run meet: {error}. Has the run ended on that host, and why? Otherwise see that "
        "hosts reach each other (MASTER_ADDR, which no host may take for loopback, firewalls)."
    )


def prefixed(store: dist.Store, attempt: int = 0) -> dist.Store:
    """This module's part of the launcher's store."""
    return dist.PrefixStore(f"hone/{attempt}", store)
