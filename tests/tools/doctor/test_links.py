"""Rates between processes: real over gloo, and pairs that hang, die or are slow."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest

from hone.tools.doctor import links
from hone.tools.doctor import machine as module
from hone.tools.doctor.machine import Device, Machine, ReadingError, TorchBuild

ERROR = "NCCL error: unhandled system error"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    try:
        get_context("spawn").Lock()
    except OSError as error:
        pytest.skip(f"processes cannot have semaphores here (/dev/shm): {error}")
    with Machine(tmp_path) as machine:
        machine.torch = TorchBuild("2.13.0", None, 0, "")
        yield machine


def hang(bad: list[links.Pair], meeting: str, pair: links.Pair, index: int) -> float:
    if pair in bad:
        time.sleep(600)
    return 3e9 + index * 1e9


def die(meeting: str, pair: links.Pair, index: int) -> float:
    if index == 1:
        os.kill(os.getpid(), signal.SIGBUS)
    time.sleep(600)
    return 0.0


def fail(bad: int, meeting: str, pair: links.Pair, index: int) -> float:
    if bad in pair:
        raise RuntimeError(f"{ERROR}\nlong trace")
    return 1e9


def test_two_processes_send_through_gloo(machine: Machine) -> None:
    found = links.links(machine)
    assert found is not None
    assert found.level == "ok", found
    assert float(found.measured.removesuffix(" GB/s")) > 0.001


def test_a_pair_that_hangs_is_named_and_the_others_are_measured(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "PAIR_S", 5.0)
    monkeypatch.setattr(links, "_load_torch", no_torch)
    rates, failed = links.measure_pairs(machine, 3, partial(hang, [(0, 2)]))
    assert rates == {(0, 1): 3.0, (1, 2): 4.0}
    assert failed == {(0, 2): "process 0 gave no answer within 5 s"}


def test_a_gpu_whose_pairs_fail_is_left_out_and_the_others_are_measured(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_load_torch", no_torch)
    rates, failed = links.measure_pairs(machine, 4, partial(fail, 0))
    assert set(rates) == {(1, 2), (1, 3), (2, 3)}
    assert failed.pop((0, 3)) == "not tried"
    assert failed.keys() == {(0, 1), (0, 2)}
    for pair, said in failed.items():  # both fail; either may be the first
        names = [f"process {index} ended with RuntimeError: {ERROR}" for index in pair]
        assert said in names


def test_a_process_that_dies_is_told_at_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_load_torch", no_torch)
    monkeypatch.setattr(links, "PAIR_S", 600.0)
    _, failed = links.measure_pairs(machine, 2, die)
    assert failed.keys() == {(0, 1)}
    assert failed[0, 1].startswith("process 1 ended with BrokenProcessPool")


@pytest.mark.parametrize(
    ("name", "rates", "failed", "level", "words"),
    [
        ("NVIDIA H200", {(0, 1): 330.0}, {}, "ok", "330.0 GB/s"),
        ("NVIDIA H200", {(0, 1): 330.0, (0, 2): 340.0}, {}, "ok", "330.0 to 340.0 GB/s"),
        ("NVIDIA H200", {(0, 1): 330.0, (0, 2): 20.0}, {}, "slow", "GPU 0 and 2: 20.0 GB/s"),
        ("NVIDIA L4", {(0, 1): 17.0}, {}, "ok", "16 GB/s or more"),
        ("NVIDIA Z9", {(0, 1): 9.0, (0, 2): 9.0, (1, 2): 4.0}, {}, "slow", "GPU 1 and 2: 4.0"),
        ("NVIDIA H200", {}, {(0, 1): "hung"}, "wrong", "GPU 0 and 1: hung"),
        ("NVIDIA H200", {(0, 2): 20.0}, {(0, 1): "hung"}, "wrong", "NCCL_P2P_DISABLE=1"),
    ],
)
def test_what_is_said_of_pairs_of_gpus(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    *,
    name: str,
    rates: dict[links.Pair, float],
    failed: dict[links.Pair, str],
    level: str,
    words: str,
) -> None:
    machine.torch = TorchBuild("2.13.0", "12.8", 3, "")
    machine.devices = [Device(name, f"GPU-{n}", 1.0) for n in range(3)]
    monkeypatch.setattr(links, "measure_pairs", lambda *_: (rates, failed))
    found = links.links(machine)
    assert found is not None
    assert found.level == level
    assert words in str(found)


def test_one_gpu_has_no_link(machine: Machine) -> None:
    machine.torch = TorchBuild("2.13.0", "12.8", 1, "")
    assert links.links(machine) is None


def test_a_host_without_room_for_semaphores_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system refuses them where /dev/shm is full, which the doctor says of itself then."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "ProcessPoolExecutor", full)
    with Machine(tmp_path) as machine, pytest.raises(ReadingError, match=r"No space.*/dev/shm"):
        machine.ask([0], no_torch, 1.0)


def no_torch(index: int) -> None:
    pass
