"""Traffic of the host's network: which counters are read, and what becomes of them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hone.observe import network
from hone.observe.network import NetworkUse
from tests.tables import table

SENT, RECEIVED = "perf/network_sent_bytes_per_s", "perf/network_received_bytes_per_s"


class Host:
    """Counters of a host, and its clock."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.now_s = folder, 100.0
        self.devices: dict[str, tuple[int, int]] = {}
        monkeypatch.setattr(network, "SYS", folder)
        monkeypatch.setattr(network.time, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(network.psutil, "net_io_counters", self.counters)

    def counters(self, *, pernic: bool) -> dict[str, SimpleNamespace]:
        assert pernic
        return {
            name: SimpleNamespace(bytes_sent=sent, bytes_recv=received)
            for name, (sent, received) in self.devices.items()
        }

    def card(self, name: str) -> None:
        (self.folder / "net" / name / "device").mkdir(parents=True)

    def port(self, name: str, sent: int, received: int) -> None:
        folder = self.folder / "infiniband" / name / "ports/1/counters"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "port_xmit_data").write_text(f"{sent // 4}\n")
        (folder / "port_rcv_data").write_text(f"{received // 4}\n")

    def efa(self, name: str, **counters: int) -> None:
        folder = self.folder / "infiniband" / name / "ports/1/hw_counters"
        folder.mkdir(parents=True, exist_ok=True)
        for counter, value in counters.items():
            (folder / counter).write_text(f"{value}\n")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def test_rates_are_of_the_time_since_the_last_reading(host: Host) -> None:
    host.devices = {"eth0": (1000, 5000)}
    use = NetworkUse()
    host.now_s += 2.0
    host.devices = {"eth0": (1400, 5100)}
    assert use.take() == {SENT: 200.0, RECEIVED: 50.0}
    host.now_s += 4.0
    assert use.take() == {SENT: 0.0, RECEIVED: 0.0}


def test_bridges_and_the_loopback_count_no_byte_again(host: Host) -> None:
    host.card("eth0")
    host.devices = {"eth0": (0, 0), "docker0": (0, 0), "lo": (0, 0)}
    use = NetworkUse()
    host.now_s += 1.0
    host.devices = {"eth0": (100, 10), "docker0": (90, 9), "lo": (7000, 7000)}
    assert use.take() == {SENT: 100.0, RECEIVED: 10.0}


def test_a_container_without_a_card_has_what_its_devices_count(host: Host) -> None:
    host.devices = {"eth0": (0, 0), "lo": (0, 0)}
    use = NetworkUse()
    host.now_s += 1.0
    host.devices = {"eth0": (30, 40), "lo": (500, 500)}
    assert use.take() == {SENT: 30.0, RECEIVED: 40.0}


def test_ports_of_rdma_are_read_and_count_once_beside_their_card(host: Host) -> None:
    host.card("eth0")
    host.devices = {"eth0": (0, 0)}
    host.port("mlx5_0", 0, 0)
    host.port("mlx5_1", 0, 0)
    use = NetworkUse()
    host.now_s += 1.0
    host.devices = {"eth0": (400, 8000)}
    host.port("mlx5_0", 4000, 2000)
    host.port("mlx5_1", 4000, 2000)
    assert use.take() == {SENT: 8000.0, RECEIVED: 8000.0}


@table(
    "grown, sent, received",
    [
        ({"tx_bytes": 700, "rx_bytes": 500}, 700.0, 500.0),
        # RDMA is a part of what the device counts, or it is not.
        ({"tx_bytes": 700, "send_bytes": 100, "rdma_write_bytes": 500}, 700.0, 0.0),
        ({"tx_bytes": 100, "send_bytes": 100, "rdma_write_bytes": 500}, 600.0, 0.0),
        ({"rx_bytes": 9, "recv_bytes": 9, "rdma_read_bytes": 20}, 0.0, 29.0),
        ({"rx_bytes": 9, "recv_bytes": 9, "rdma_write_recv_bytes": 30}, 0.0, 39.0),
        ({"rdma_read_resp_bytes": 40}, 0.0, 0.0),
    ],
)
def test_efa_is_read_and_no_byte_counts_twice(
    host: Host, grown: dict[str, int], sent: float, received: float
) -> None:
    """It has no `port_xmit_data`. Two cards, which began with what they had carried before."""
    before = {"tx_bytes": 10**9, "rx_bytes": 10**8, **dict.fromkeys(grown, 10**7)}
    cards = ("rdmap16s27", "rdmap32s27")
    for card in cards:
        host.efa(card, **before)
    use = NetworkUse()
    host.now_s += 2.0
    for card in cards:
        host.efa(card, **{name: before[name] + more for name, more in grown.items()})
    assert use.take() == {SENT: sent, RECEIVED: received}


def test_counters_of_another_device_are_not_those_of_efa(host: Host) -> None:
    host.efa("mlx5_0", send_bytes=0, out_of_sequence=0)
    use = NetworkUse()
    host.now_s += 1.0
    host.efa("mlx5_0", send_bytes=100, out_of_sequence=100)
    assert use.take() == {SENT: 0.0, RECEIVED: 0.0}


def test_a_counter_that_began_anew_hides_no_other(host: Host) -> None:
    host.devices = {"eth0": (900, 900), "eth1": (0, 0)}
    use = NetworkUse()
    host.now_s += 1.0
    host.devices = {"eth0": (0, 0), "eth1": (50, 60)}
    assert use.take() == {SENT: 50.0, RECEIVED: 60.0}


def test_a_device_that_comes_or_goes_brings_no_bytes_of_its_life(host: Host) -> None:
    host.devices = {"eth0": (0, 0), "eth1": (10**12, 10**12)}
    use = NetworkUse()
    host.now_s += 1.0
    host.devices = {"eth0": (5, 6), "eth2": (3 * 10**12, 3 * 10**12)}
    assert use.take() == {SENT: 5.0, RECEIVED: 6.0}
    host.now_s += 1.0
    host.devices = {"eth0": (5, 6), "eth2": (3 * 10**12 + 7, 3 * 10**12 + 8)}
    assert use.take() == {SENT: 7.0, RECEIVED: 8.0}


@table("unreadable", ["N/A (no PMA)\n", "", None])
def test_a_port_that_cannot_be_read_for_a_while_counts_when_it_can(
    host: Host, unreadable: str | None
) -> None:
    sent = host.folder / "infiniband/mlx5_0/ports/1/counters/port_xmit_data"
    host.port("mlx5_0", 4000, 4000)
    use = NetworkUse()
    sent.unlink()
    if unreadable is not None:
        sent.write_text(unreadable)
    host.now_s += 1.0
    assert use.take() == {SENT: 0.0, RECEIVED: 0.0}
    for sent_bytes, rate in ((8000, 0.0), (8400, 400.0)):
        host.port("mlx5_0", sent_bytes, 4000)
        host.now_s += 1.0
        assert use.take() == {SENT: rate, RECEIVED: 0.0}


def test_the_loopback_of_macos_is_none_of_it(host: Host) -> None:
    host.devices = {"en0": (0, 0), "lo0": (0, 0)}
    use = NetworkUse()
    host.now_s += 1.0
    host.devices = {"en0": (3, 4), "lo0": (900, 900)}
    assert use.take() == {SENT: 3.0, RECEIVED: 4.0}


def test_counters_that_may_not_be_read_end_no_run(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/proc/net/dev")

    monkeypatch.setattr(network.psutil, "net_io_counters", refuse)
    use = NetworkUse()
    host.now_s += 1.0
    assert use.take() == {SENT: 0.0, RECEIVED: 0.0}


def test_a_folder_of_the_kernel_that_may_not_be_read_ends_no_run(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = os.stat

    def refuse(path: Any, **rest: Any) -> os.stat_result:
        if str(path).startswith(str(host.folder)):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **rest)

    monkeypatch.setattr(os, "stat", refuse)
    host.devices = {"eth0": (0, 0), "lo": (0, 0)}
    use = NetworkUse()
    host.now_s += 1.0
    host.devices = {"eth0": (30, 40), "lo": (500, 500)}
    assert use.take() == {SENT: 30.0, RECEIVED: 40.0}
