"""Ports for other processes of a run, each open at one address only."""

from __future__ import annotations

import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta

import psutil
import torch.distributed as dist

from hone.distributed.processes import environment

__all__ = ["LOOPBACK", "host_store", "interface_of", "listen", "on_loopback"]

LOOPBACK = "127.0.0.1"
_BACKLOG = 4096
"""Length of the queue of new connections: a thousand engines connect at the same moment."""


def listen(host: str, port: int = 0) -> socket.socket:
    """Listen at `port` of the address of `host`, and at no other interface. Port 0 takes a free
    one. `host` is the name or address by which the run's other processes reach this machine.

    Raises OSError, with a remedy, if `host` is not an address of this machine or the port is taken.
    """
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place, family=family, backlog=_BACKLOG)
    except OSError as error:
        refused = f"port {port} cannot" if port else "no port can"
        raise OSError(
            error.errno,
            f"{refused} be opened at {host} ({error.strerror}). Other processes of the run reach "
            "this machine by that name, so it has to resolve to an address of it here too.",
        ) from error


def host_store(host: str, port: int = 0, *, timeout_s: float) -> dist.TCPStore:
    """A store that this process serves at `port` of the address `host`; port 0 takes a free one.
    torch's own server would listen at all interfaces. Raises OSError as `listen`."""
    with listen(host, port) as listener:
        return dist.TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=os.dup(listener.fileno()),
        )


def interface_of(address: str) -> str | None:
    """The network interface of this machine with the given address, or None."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(own.address == address for own in addresses):
            return name
    return None


@contextmanager
def on_loopback() -> Generator[None]:
    """Context manager in which new process groups of torch.distributed listen at loopback only.

    By default gloo listens at the address of the host's name, and NCCL at an interface that other
    hosts reach. Interfaces that the environment names are kept. Child processes inherit the
    setting.
    """
    name = interface_of(LOOPBACK)
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    with environment({key: name for key in names if name and key not in os.environ}):
        yield
