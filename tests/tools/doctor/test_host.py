"""Checks of the host: what each says of raw readings, faked where this machine has others."""

from __future__ import annotations

import errno
import os
import shutil
from collections import namedtuple
from collections.abc import Callable, Iterator
from email.message import Message
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from hone.tools.doctor import host
from hone.tools.doctor.machine import Finding, Machine

GIB = 2**30
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with Machine(tmp_path / "runs") as machine:
        machine.max_gpus = 0
        yield machine


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Fakes the free space of every disk, in GiB."""

    def fake(gib: float) -> None:
        usage = Usage(100 * GIB, 0, int(gib * GIB))
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    return fake


def test_this_machine_gets_a_finding_of_every_check(machine: Machine) -> None:
    for check in (
        host.versions,
        host.cores,
        host.memory,
        host.open_files,
        host.disk,
        host.programs,
    ):
        found = check(machine)
        assert found.measured
        assert found.expected
        assert (found.level == "ok") == (found.remedy == "")


@pytest.mark.parametrize(
    ("requires", "level", "words"),
    [
        (["numpy>=2.1"], "ok", "requires"),
        (["numpy<1"], "wrong", "pip install 'numpy<1'"),
        (["no-such-package>=3"], "wrong", "no-such-package missing"),
        (["no-such-package>=3; extra == 'wandb'"], "ok", ""),
        (["numpy<1; extra == 'wandb'"], "wrong", "numpy<1"),
        (["numpy<1; extra == 'dev'"], "ok", ""),
        (["numpy<1; platform_system == 'Windows'"], "ok", ""),
        (["numpy<1; platform_system != 'Windows' and extra == 'wandb'"], "wrong", ""),
    ],
)
def test_versions_are_those_that_hone_requires(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    requires: list[str],
    level: str,
    words: str,
) -> None:
    monkeypatch.setattr(host, "metadata", lambda name: package(requires))
    found = host.versions(machine)
    assert found.level == level
    assert words in str(found)


def test_another_python_is_wrong(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "metadata", lambda name: package([], python=">=3.99"))
    found = host.versions(machine)
    assert (found.level, found.remedy) == ("wrong", "Make an environment with Python >=3.99.")


def test_hone_that_is_not_installed_is_told(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(host, "metadata", missing)
    assert "pip install -e ." in host.versions(machine).remedy


def package(requires: list[str], python: str = ">=3.11,<3.14") -> Message:
    found = Message()
    found["Version"], found["Requires-Python"] = "0.1.0", python
    for extra in ("wandb", "dev"):
        found["Provides-Extra"] = extra
    for need in requires:
        found["Requires-Dist"] = need
    return found


@pytest.mark.parametrize(
    ("usable", "quota", "threads", "max_gpus", "level", "words"),
    [
        (8, None, None, 0, "ok", "8 usable"),
        (8, None, "8", 0, "ok", "OMP_NUM_THREADS=8"),
        (8, None, "9", 0, "slow", "OMP_NUM_THREADS=8 in the"),
        (8, "max 100000", None, 0, "ok", "8 usable,"),
        (64, "250000 100000", None, 0, "slow", "2.5 by the control group"),
        (64, "250000 100000", None, 0, "slow", "OMP_NUM_THREADS=2 in the"),
        (64, "250000 100000", "2", 0, "ok", ""),
        (8, None, None, 8, "slow", "get more cores"),
        (9, None, None, 8, "ok", ""),
    ],
)
def test_cores(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    *,
    tmp_path: Path,
    usable: int,
    quota: str | None,
    threads: str | None,
    max_gpus: int,
    level: str,
    words: str,
) -> None:
    monkeypatch.setattr(host, "num_usable_cores", lambda: usable)
    monkeypatch.setattr(host, "CPU_QUOTA", tmp_path / "cpu.max")
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    machine.max_gpus = max_gpus
    found = host.cores(machine)
    assert found.level == level
    assert words in str(found)


@pytest.mark.parametrize(
    ("gib", "max_gpus", "level"), [(3, 0, "ok"), (1, 0, "wrong"), (3, 8, "wrong")]
)
def test_memory(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, gib: int, max_gpus: int, level: str
) -> None:
    monkeypatch.setattr(host, "available_host_bytes", lambda: gib * GIB)
    machine.max_gpus = max_gpus
    assert host.memory(machine).level == level


@pytest.mark.parametrize(
    ("limits", "has_ray", "level"),
    [
        ((1024, 4096), False, "ok"),
        ((1024, 4096), True, "slow"),
        ((1024, host.resource.RLIM_INFINITY), True, "ok"),
        ((256, 8192), False, "slow"),
        ((128, 8192), False, "wrong"),
        ((host.resource.RLIM_INFINITY,) * 2, True, "ok"),
    ],
)
def test_open_files(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    limits: tuple[int, int],
    has_ray: bool,
    level: str,
) -> None:
    monkeypatch.setattr(host.resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(host, "is_installed", lambda name: has_ray)
    found = host.open_files(machine)
    assert found.level == level
    assert ("ulimit -n" in found.remedy) == (level != "ok")


@pytest.mark.parametrize(
    ("gib", "max_gpus", "has_ray", "level"),
    [
        (0.0625, 8, False, "wrong"),
        (0.0625, None, False, "wrong"),
        (0.0625, 1, True, "slow"),
        (0.0625, 1, False, "ok"),
        (0.0625, 0, False, "ok"),
        (16, 8, True, "ok"),
    ],
)
def test_shared_memory(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    *,
    free: Callable[[float], None],
    tmp_path: Path,
    gib: float,
    max_gpus: int | None,
    has_ray: bool,
    level: str,
) -> None:
    free(gib)
    monkeypatch.setattr(host, "SHM", tmp_path)
    monkeypatch.setattr(host, "is_installed", lambda name: has_ray)
    machine.max_gpus = max_gpus
    found = host.shared_memory(machine)
    assert found is not None
    assert found.level == level
    assert ("--shm-size" in found.remedy) == (level != "ok")
    monkeypatch.setattr(host, "SHM", tmp_path / "none")
    assert host.shared_memory(machine) is None


@pytest.mark.parametrize(
    ("gib", "rate", "level", "words"),
    [
        (50, 500e6, "ok", "50.0 GiB free, 500 MB/s"),
        (50, 90e6, "slow", "faster disk"),
        (5, 500e6, "slow", "14 bytes a weight"),
        (0.5, 500e6, "wrong", "14 bytes a weight"),
    ],
)
def test_disk(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    *,
    free: Callable[[float], None],
    gib: float,
    rate: float,
    level: str,
    words: str,
) -> None:
    free(gib)
    monkeypatch.setattr(host, "_write_rate", lambda folder, num_bytes: rate)
    found = host.disk(machine)
    assert found.level == level
    assert words in str(found)


def test_the_write_rate_is_of_this_disk_and_leaves_nothing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(host, "WRITTEN_BYTES", 2**23)
    synced: list[int] = []
    fsync = os.fsync

    def sync(number: int) -> None:
        synced.append(os.fstat(number).st_size)
        fsync(number)

    monkeypatch.setattr(os, "fsync", sync)
    assert " MB/s in " in host.disk(machine).measured
    assert synced == [2**23]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_is_wrong(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(folder: Path, num_bytes: int) -> float:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(host, "_write_rate", refuse)
    found: Finding = host.disk(machine)
    assert found.level == "wrong"
    assert os.strerror(number) in found.measured
    assert "--run.dir" in found.remedy


def test_walls_that_are_missing_are_named_with_what_programs_can_do(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "missing_walls", lambda: {"network": "use the network"})
    found = host.programs(machine)
    assert (found.level, "network" in found.measured) == ("slow", True)
    assert "use the network" in found.remedy
