"""Checks of GPUs on what `nvidia-smi` writes, by a program of that name, and what torch says."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from hone.hardware import Peaks
from hone.tools.doctor import gpus
from hone.tools.doctor import machine as machine_module
from hone.tools.doctor.machine import Device, Machine, ReadingError, TorchBuild

H200, UNKNOWN = "NVIDIA H200", "NVIDIA Z9"


def smi(
    *,
    word: str = "event",
    active: str = "",
    errors: str = "0",
    clock: str = "1800 MHz",
    number: int = 2,
) -> str:
    """`nvidia-smi -q -x` of GPUs whose last one is as the arguments say."""

    def gpu(index: int) -> str:
        is_last, state = index == number - 1, ("Not Active", "Active")
        reasons = "".join(
            f"<clocks_{word}_reason_{name}>{state[is_last and name == active]}"
            f"</clocks_{word}_reason_{name}>"
            for name in ("gpu_idle", "sw_power_cap", "hw_slowdown", "sw_thermal_slowdown")
        )
        return f"""
  <gpu id="00000000:0{index}:00.0">
    <product_name>{H200}</product_name>
    <uuid>GPU-{index}</uuid>
    <persistence_mode>Enabled</persistence_mode>
    <clocks_{word}_reasons>{reasons}</clocks_{word}_reasons>
    <ecc_errors>
      <volatile>
        <sram_correctable>7</sram_correctable>
        <dram_uncorrectable>{errors if is_last else 0}</dram_uncorrectable>
      </volatile>
      <aggregate><dram_uncorrectable>3</dram_uncorrectable></aggregate>
    </ecc_errors>
    <clocks>
      <graphics_clock>1 MHz</graphics_clock>
      <sm_clock>{clock if is_last else "1800 MHz"}</sm_clock>
    </clocks>
    <max_clocks><sm_clock>1980 MHz</sm_clock></max_clocks>
  </gpu>"""

    listed = "".join(map(gpu, range(number)))
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n'
        "<nvidia_smi_log><driver_version>570.1</driver_version><cuda_version>12.8</cuda_version>"
        f"{listed}</nvidia_smi_log>"
    )


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Two H200 that are right; `nvidia-smi` writes the file `smi.xml`."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n[ \"$*\" = '-q -x' ] && cat {tmp_path}/smi.xml\n")
    program.chmod(0o755)
    (tmp_path / "smi.xml").write_text(smi())
    with Machine(tmp_path) as machine:
        machine.max_gpus = 2
        machine.torch = TorchBuild("2.13.0", "12.8", 2, "")
        machine.devices = [Device(H200, f"GPU-{n}", 0.99) for n in range(2)]
        yield machine


def loaded(machine: Machine, *peaks: Peaks) -> Machine:
    machine.under_load = ([*peaks], machine.driver.gpus)
    return machine


def peaks(tflops: float = 780, tb_per_s: float = 4.2, name: str = H200) -> Peaks:
    return Peaks(name, tb_per_s * 1e12, tflops * 1e12, "measured")


@pytest.mark.parametrize(
    ("text", "level", "words"),
    [
        (smi(), "ok", "570.1, CUDA 12.8, 2 x NVIDIA H200"),
        (smi(errors="2"), "wrong", "memory errors of GPU 1"),
        (smi(errors="N/A"), "ok", ""),
        (smi(number=0), "ok", "no GPU"),
    ],
)
def test_driver(machine: Machine, tmp_path: Path, text: str, level: str, words: str) -> None:
    (tmp_path / "smi.xml").write_text(text)
    found = gpus.driver(machine)
    assert found.level == level
    assert words in found.measured


def test_without_a_gpu_no_driver_is_asked(machine: Machine, tmp_path: Path) -> None:
    machine.max_gpus = 0
    (tmp_path / "nvidia-smi").unlink()
    assert gpus.driver(machine).level == "ok"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (None, "nvidia-smi is not installed"),
        ("echo Failed to initialize NVML: Driver/library version mismatch; exit 18", "mismatch"),
        ("exec sleep 60", "no answer within 0 s"),
        ("echo '<nvidia_smi_log>'", "wrote no XML"),
    ],
)
def test_a_driver_that_does_not_answer(
    machine: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str | None,
    words: str,
) -> None:
    if script is None:
        (tmp_path / "nvidia-smi").unlink()
        monkeypatch.setenv("PATH", f"{tmp_path}")
    else:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    if "sleep" in f"{script}":
        monkeypatch.setattr(machine_module, "_SMI_S", 0.3)
    with pytest.raises(ReadingError, match=words):
        gpus.driver(machine)


@pytest.mark.parametrize(
    ("build", "listed", "level", "words"),
    [
        (TorchBuild("2.13.0+cpu", None, 0, ""), 0, "ok", "built for CPUs"),
        (TorchBuild("2.13.0", "12.8", 2, ""), 2, "ok", "sees 2 GPUs"),
        (TorchBuild("2.13.0", "12.8", 2, ""), None, "ok", "sees all"),
        (TorchBuild("2.13.0+cpu", None, 0, ""), 2, "wrong", "a build for CUDA"),
        (TorchBuild("2.13.0", "13.0", 0, "The driver is too old"), 2, "wrong", "serve CUDA 13.0"),
        (TorchBuild("2.13.0", "13.0", 0, "The driver is too old"), None, "wrong", "too old"),
        (TorchBuild("2.13.0", "12.8", 1, ""), 2, "wrong", "nvidia-smi -L"),
    ],
)
def test_torch(
    machine: Machine, build: TorchBuild, listed: int | None, level: str, words: str
) -> None:
    machine.torch, machine.max_gpus = build, listed
    found = gpus.torch_build(machine)
    assert found.level == level
    assert words in str(found)


def test_this_torch_is_looked_at_in_another_process(tmp_path: Path) -> None:
    try:
        get_context("spawn").Lock()
    except OSError as error:
        pytest.skip(f"processes cannot have semaphores here (/dev/shm): {error}")
    with Machine(tmp_path) as machine:
        machine.max_gpus = 0
        assert gpus.torch_build(machine).level == "ok"
        machine.max_gpus = 1
        found = gpus.torch_build(machine)
    import torch

    if not torch.cuda.is_available():
        assert found.level == "wrong"


def test_memory_that_somebody_holds_is_wrong(machine: Machine) -> None:
    found = gpus.free_memory(machine)
    assert found is not None
    assert (found.level, found.measured) == ("ok", "99% free")
    machine.devices[1] = Device(H200, "GPU-1", 0.4)
    found = gpus.free_memory(machine)
    assert found is not None
    assert (found.level, found.measured) == ("wrong", "GPU 1 40% free")


@pytest.mark.parametrize(
    ("measured", "level", "words"),
    [
        ([peaks(), peaks()], "ok", "780 TFLOP/s and 4.20 TB/s"),
        ([peaks(), peaks(600)], "slow", "GPU 1: 600 TFLOP/s"),
        ([peaks(tb_per_s=3.0), peaks()], "slow", "GPU 0: 780 TFLOP/s and 3.00"),
        ([peaks(1, name=UNKNOWN)] * 2, "ok", "table has no NVIDIA Z9"),
        ([peaks(1500, 6, "NVIDIA B200")] * 2, "ok", "65% of 2,250"),
        ([peaks(1400, 6, "NVIDIA B200")] * 2, "slow", "datasheet"),
    ],
)
def test_rates(machine: Machine, measured: list[Peaks], level: str, words: str) -> None:
    found = gpus.rates(loaded(machine, *measured))
    assert found is not None
    assert found.level == level
    assert words in str(found)


@pytest.mark.parametrize(
    ("said", "level", "words"),
    [
        ({}, "ok", "91% of the highest"),
        ({"active": "sw_power_cap"}, "ok", ""),
        ({"active": "sw_thermal_slowdown"}, "wrong", "GPU 1: sw_thermal_slowdown"),
        ({"active": "hw_slowdown", "word": "throttle"}, "wrong", "GPU 1: hw_slowdown"),
        ({"clock": "900 MHz"}, "slow", "GPU 1 at 45%"),
    ],
)
def test_clocks(
    machine: Machine, tmp_path: Path, said: dict[str, Any], level: str, words: str
) -> None:
    (tmp_path / "smi.xml").write_text(smi(**said))
    found = gpus.clocks(loaded(machine))
    assert found is not None
    assert found.level == level
    assert words in found.measured


def test_clocks_are_those_of_the_visible_gpus(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "smi.xml").write_text(smi(active="hw_slowdown"))
    machine.devices = [Device(H200, "GPU-0", 1.0)]  # as with CUDA_VISIBLE_DEVICES=0
    found = gpus.clocks(loaded(machine))
    assert found is not None
    assert found.level == "ok"
    machine.devices = [Device(H200, "MIG-7", 1.0)]
    assert gpus.clocks(machine) is None


def test_on_a_cpu_there_is_nothing_to_check(machine: Machine) -> None:
    machine.torch = TorchBuild("2.13.0+cpu", None, 0, "")
    assert [check(machine) for check in (gpus.free_memory, gpus.rates, gpus.clocks)] == [None] * 3
