"""Traffic of this host's network, for the question whether it is what a run waits for.

    use = NetworkUse()
    use.take()    # {"perf/network_sent_bytes_per_s": ..., "perf/network_received_bytes_per_s": ...}

NCCL over InfiniBand, RoCE or EFA does not pass the kernel's network devices, so the counters of
RDMA ports are read as well. Some bytes are counted by both, as those of IP over InfiniBand; hence
the larger one is taken and not the sum. NVLink and shared memory are no network.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
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

_EFA_OPERATIONS = (
    ("send_bytes", "rdma_write_bytes"),
    ("recv_bytes", "rdma_read_bytes", "rdma_write_recv_bytes"),
)
"""Counters of EFA by operation: those of bytes sent, and received. `rdma_read_resp_bytes` is left
out, since descriptions differ in which side counts it: what others read from this host counts as
far as `tx_bytes` has it."""


class _Bytes(NamedTuple):
    """Bytes since a device or port has come up."""

    sent: int
    received: int


class NetworkUse:
    """Network traffic of this host since the last `take`, of all programs."""

    def __init__(self) -> None:
        self._before = _read()
        self._at_s = time.perf_counter()

    def take(self) -> dict[str, float]:
        """Mean bytes a second that were sent and received. What cannot be read counts as 0."""
        now_s, now = time.perf_counter(), _read()
        seconds = max(now_s - self._at_s, 1e-9)
        grown = [_growth(new, old) for new, old in zip(now, self._before, strict=True)]
        self._before, self._at_s = now, now_s
        return {
            "perf/network_sent_bytes_per_s": max(one.sent for one in grown) / seconds,
            "perf/network_received_bytes_per_s": max(one.received for one in grown) / seconds,
        }


def _read() -> tuple[dict[str, _Bytes], ...]:
    """All counters, in groups of which some count the same bytes as others."""
    return _read_devices(), _read_ports(), *_read_efa()


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


def _read_efa() -> tuple[dict[str, _Bytes], dict[str, _Bytes]]:
    """Counters of EFA ports that can be read, by folder: of the device as a whole, and the sums of
    its operations, of which older devices lack some. Neither Linux (drivers/infiniband/hw/efa) nor
    AWS says whether the former have the bytes of RDMA, so the two are not added."""
    whole: dict[str, _Bytes] = {}
    operations: dict[str, _Bytes] = {}
    for folder in glob(f"{SYS}/infiniband/*/ports/*/hw_counters"):
        try:
            whole[folder] = _Bytes(*(_read_number(folder, f"{x}_bytes") for x in ("tx", "rx")))
        except (OSError, ValueError):  # another device
            continue
        counted = [0, 0]
        for direction, names in enumerate(_EFA_OPERATIONS):
            for name in names:
                with suppress(OSError, ValueError):
                    counted[direction] += _read_number(folder, name)
        operations[folder] = _Bytes(*counted)
    return whole, operations


def _read_number(folder: str, name: str) -> int:
    return int(Path(folder, name).read_text(encoding="ascii"))


def _read_words(file: Path) -> int:
    return _WORD * int(file.read_text(encoding="ascii"))
