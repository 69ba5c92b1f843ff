"""Traffic of this host's network, for the question whether it is what a run waits for.

    use = NetworkUse()
    use.take()    # {"perf/network_sent_bytes_per_s": ..., "perf/network_received_bytes_per_s": ...}

NCCL over InfiniBand or RoCE does not pass the kernel's network devices, so the counters of RDMA
ports are read as well. Some bytes are counted by both, as those of IP over InfiniBand; hence the
larger of both is taken and not the sum. NVLink and shared memory are no network.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from glob import glob
from pathlib import Path
from typing import NamedTuple

import psutil

__all__ = ["NetworkUse"]

SYS = Path("/sys/class")
_LOOPBACKS = ("lo", "lo0")
"""Names of the loopback on Linux, and on macOS and the BSDs."""
_WORD = 4
"""Bytes of a unit of the counters of RDMA ports (Linux, Documentation/ABI/stable/sysfs-class-
infiniband)."""


class _Bytes(NamedTuple):
    """Bytes since a device or port has come up."""

    sent: int
    received: int


class NetworkUse:
    """Network traffic of this host since the last `take`, of all programs."""

    def __init__(self) -> None:
        self._devices, self._ports = _read_devices(), _read_ports()
        self._at_s = time.perf_counter()

    def take(self) -> dict[str, float]:
        """Mean bytes a second that were sent and received. What cannot be read counts as 0."""
        now_s, devices, ports = time.perf_counter(), _read_devices(), _read_ports()
        seconds = max(now_s - self._at_s, 1e-9)
        grown = _growth(devices, self._devices), _growth(ports, self._ports)
        self._devices, self._ports, self._at_s = devices, ports, now_s
        return {
            "perf/network_sent_bytes_per_s": max(one.sent for one in grown) / seconds,
            "perf/network_received_bytes_per_s": max(one.received for one in grown) / seconds,
        }


def _growth(new: Mapping[str, _Bytes], old: Mapping[str, _Bytes]) -> _Bytes:
    """Bytes of the time between two readings. A device that is in one of them alone is left out: it
    has the bytes of its whole life. A counter that began anew is smaller than before and counts as
    0."""
    pairs = [(new[name], old[name]) for name in new.keys() & old.keys()]
    return _Bytes(
        sent=sum(max(0, after.sent - before.sent) for after, before in pairs),
        received=sum(max(0, after.received - before.received) for after, before in pairs),
    )


def _read_devices() -> dict[str, _Bytes]:
    """Counters of the network cards, by name; of all devices but the loopback where none is a card,
    as in a container. Bridges and tunnels would count the same bytes again."""
    try:
        counters = psutil.net_io_counters(pernic=True)
    except OSError:  # some sandboxes have no /proc/net, or do not let it be read
        return {}
    cards = [name for name in counters if os.path.exists(SYS / "net" / name / "device")]
    names = cards or [name for name in counters if name not in _LOOPBACKS]
    return {name: _Bytes(counters[name].bytes_sent, counters[name].bytes_recv) for name in names}


def _read_ports() -> dict[str, _Bytes]:
    """Counters of the RDMA ports that can be read, by folder."""
    found: dict[str, _Bytes] = {}
    for folder in glob(f"{SYS}/infiniband/*/ports/*/counters"):
        try:
            found[folder] = _Bytes(
                _read_words(Path(folder, "port_xmit_data")),
                _read_words(Path(folder, "port_rcv_data")),
            )
        except (OSError, ValueError):  # a port that is down, or one that says "N/A (no PMA)"
            continue
    return found


def _read_words(file: Path) -> int:
    return _WORD * int(file.read_text(encoding="ascii"))
