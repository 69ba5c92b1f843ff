"""Traffic of this host's network, for the question whether it is what a run waits for.

    use = NetworkUse()
    use.take()    # {"perf/network_sent_bytes_per_s": ..., "perf/network_received_bytes_per_s": ...}

NCCL over InfiniBand or RoCE does not pass the kernel's network devices, so the counters of RDMA
ports are read as well. Those of RoCE count what passes the network device of the same card too,
hence the larger of both is taken and not the sum. NVLink and shared memory are no network.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

__all__ = ["NetworkUse"]

SYS = Path("/sys/class")
_WORD = 4
"""Bytes of a unit of the counters of RDMA ports (Linux, Documentation/ABI/stable/sysfs-class-
infiniband)."""


class _Bytes(NamedTuple):
    """Bytes since the host has started."""

    sent: int
    received: int


class NetworkUse:
    """Network traffic of this host since the last `take`, of all programs."""

    def __init__(self) -> None:
        self._devices, self._ports = _of_devices(), _of_ports()
        self._at_s = time.perf_counter()

    def take(self) -> dict[str, float]:
        """Mean bytes a second that were sent and received."""
        now_s, devices, ports = time.perf_counter(), _of_devices(), _of_ports()
        seconds = max(now_s - self._at_s, 1e-9)
        pairs = ((devices, self._devices), (ports, self._ports))
        # A counter that began anew, as with its device, would be negative.
        sent, received = (
            max(0, *(new[i] - old[i] for new, old in pairs)) / seconds for i in range(2)
        )
        self._devices, self._ports, self._at_s = devices, ports, now_s
        return {
            "perf/network_sent_bytes_per_s": sent,
            "perf/network_received_bytes_per_s": received,
        }


def _of_devices() -> _Bytes:
    """Of the network cards; of all devices but the loopback where none is a card, as in a
    container. Bridges and tunnels would count the same bytes again."""
    counters = psutil.net_io_counters(pernic=True)
    cards = [name for name in counters if (SYS / "net" / name / "device").exists()]
    names = cards or [name for name in counters if name != "lo"]
    return _sum(_Bytes(counters[name].bytes_sent, counters[name].bytes_recv) for name in names)


def _of_ports() -> _Bytes:
    """Of the RDMA ports; 0 without any."""
    return _sum(
        _Bytes(_words(folder / "port_xmit_data"), _words(folder / "port_rcv_data"))
        for folder in SYS.glob("infiniband/*/ports/*/counters")
    )


def _words(file: Path) -> int:
    try:
        return _WORD * int(file.read_text())
    except OSError:  # a port that is down has counters that cannot be read
        return 0


def _sum(parts: Iterable[_Bytes]) -> _Bytes:
    all_parts = list(parts)
    return _Bytes(sum(x.sent for x in all_parts), sum(x.received for x in all_parts))
