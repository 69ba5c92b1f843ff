"""Memory size, memory bandwidth and matrix rate of devices.

Rates are dense bfloat16 with float32 accumulation. Numbers marked as measured come from a device
copy (read and write counted) and an 8192-cubed matrix product. The others come from NVIDIA's data
sheets (for GeForce cards from the whitepapers of their architectures); no program reaches them, so
ratios against them come out 10 to 20 % lower. Memory sizes are those that drivers report; for H100
and A100 of 80 GB those that torch reports, 79.1 to 79.6 GiB.
"""

from __future__ import annotations

import math
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from hone.errors import UserError

__all__ = [
    "GIB",
    "GPUS",
    "Peaks",
    "available_host_bytes",
    "gpu_peaks",
    "installed_gpu",
    "known_gpu",
    "max_gpus",
    "num_usable_cores",
]

GIB = 1 << 30
"""Bytes."""

_CGROUPS = Path("/sys/fs/cgroup")
_DRIVERS = Path("/proc/driver/nvidia/gpus")
_SIGNS_OF_A_GPU = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Peaks:
    """The peak rates of a device."""

    name: str
    bytes_per_s: float
    flops_per_s: float
    source: Literal["measured", "datasheet"]
    datasheet_flops_per_s: float | None = None
    """Rate of the data sheet; None where there is none, as for a CPU."""
    memory_gib: int | None = None
    """Size of the memory; a program can use one to two percent less."""
    capability: tuple[int, int] = (9, 0)
    """CUDA compute capability, which decides the kernels."""
    link_bytes_per_s: float = 450e9
    """Bandwidth to the other GPUs of the host, in one direction: NVLink, or else PCIe."""
    host_bytes_per_s: float = 50e9
    """Bandwidth to the host's memory, in one direction while the other is busy too: measured on an
    H200 with PCIe 5; half of it with PCIe 4."""
    node_bytes_per_s: float = 50e9
    """Bandwidth to GPUs of other hosts, in one direction: a network card of 400 Gb/s for each
    GPU."""

    @property
    def has_fp8(self) -> bool:
        """Whether it has FP8 matrix products."""
        return self.capability >= (8, 9)


def _datasheet(
    name: str,
    tb_per_s: float,
    tflops: float,
    memory_gib: int,
    *,
    capability: tuple[int, int] = (9, 0),
    link_gb_per_s: int = 450,
    pcie: Literal[4, 5] = 5,
) -> Peaks:
    return Peaks(
        name,
        tb_per_s * 1e12,
        tflops * 1e12,
        "datasheet",
        datasheet_flops_per_s=tflops * 1e12,
        memory_gib=memory_gib,
        capability=capability,
        link_bytes_per_s=link_gb_per_s * 1e9,
        host_bytes_per_s=50e9 if pcie == 5 else 25e9,
    )


GPUS: tuple[Peaks, ...] = (
    Peaks("H200", 4.3e12, 790e12, "measured", 989e12, 140),
    _datasheet("B200", 8.0, 2250, 180, capability=(10, 0), link_gb_per_s=900),
    _datasheet("GH200", 4.0, 989, 95),
    _datasheet("H100 PCIe", 2.0, 756, 79, link_gb_per_s=64),
    _datasheet("H100 NVL", 3.9, 835, 94, link_gb_per_s=300),
    Peaks("H100", 3.1e12, 790e12, "measured", 989e12, 79),
    _datasheet("H20", 4.0, 148, 96),
    _datasheet("A100 40GB", 1.555, 312, 40, capability=(8, 0), link_gb_per_s=300, pcie=4),
    _datasheet("A100 80GB PCIe", 1.935, 312, 79, capability=(8, 0), link_gb_per_s=32, pcie=4),
    _datasheet("A100", 2.039, 312, 79, capability=(8, 0), link_gb_per_s=300, pcie=4),
    _datasheet("A40", 0.696, 150, 45, capability=(8, 6), link_gb_per_s=32, pcie=4),
    _datasheet("A10G", 0.6, 70, 22, capability=(8, 6), link_gb_per_s=32, pcie=4),
    _datasheet("A10", 0.6, 125, 22, capability=(8, 6), link_gb_per_s=32, pcie=4),
    _datasheet("RTX A6000", 0.768, 155, 48, capability=(8, 6), link_gb_per_s=32, pcie=4),
    _datasheet("L40S", 0.864, 362, 45, capability=(8, 9), link_gb_per_s=32, pcie=4),
    _datasheet("L4", 0.3, 121, 22, capability=(8, 9), link_gb_per_s=32, pcie=4),
    _datasheet("RTX 5090", 1.792, 209, 32, capability=(12, 0), link_gb_per_s=64),
    _datasheet("RTX 4090", 1.008, 165, 24, capability=(8, 9), link_gb_per_s=32, pcie=4),
    _datasheet("RTX 3090", 0.936, 71, 24, capability=(8, 6), link_gb_per_s=32, pcie=4),
)
"""Known GPUs. The first row all of whose words are in a device's name is taken."""


def gpu_peaks(device_name: str) -> Peaks | None:
    """Peaks of a GPU by the driver's name, such as `NVIDIA A100-SXM4-80GB`; None if unknown.

    Whole words are compared, so an unknown `H2000` is not taken for an `H200`. Laptop parts share
    the names of faster desktop parts and are not in the table.
    """
    words = set(re.split(r"[\s-]+", device_name.lower()))
    if "laptop" in words:
        return None
    for peaks in GPUS:
        if words.issuperset(peaks.name.lower().split()):
            return peaks
    return None


def known_gpu(name: str, *, key: str = "--gpu") -> Peaks:
    """A row of the table by a common name: `h200`, `a100-40g`, `4090`, `RTX 4090`.

    Raises UserError for an unknown name, with the setting `key` and the known names.
    """
    full = re.sub(r"(?<=\d)g\b", "gb", name.lower().replace("_", "-"))
    peaks = gpu_peaks(full) or gpu_peaks(f"RTX {full}")
    if peaks is None:
        known = ", ".join(row.name for row in GPUS)
        what = f"is {name!r}, which hone's table lacks; it has" if name else "needs a name:"
        raise UserError(f"{key} {what} {known}")
    return peaks


def installed_gpu(drivers: Path = _DRIVERS) -> Peaks | None:
    """The first GPU that NVIDIA's driver lists on this host; None if the table lacks it."""
    for information in sorted(drivers.glob("*/information")):
        model = re.search(r"^Model:\s*(.+)$", information.read_text(), re.MULTILINE)
        if model is not None:
            return gpu_peaks(model[1])
    return None


def max_gpus(visible: str | None, drivers: Path = _DRIVERS) -> int | None:
    """An upper bound on the GPUs that a process of this host can see, without asking a driver; None
    if unknown.

    `visible` is CUDA_VISIBLE_DEVICES; GPUs after its first invalid name do not count.
    """
    listed = len(list(drivers.glob("*"))) or None
    if listed is None and not any(Path(sign).exists() for sign in _SIGNS_OF_A_GPU):
        return 0
    if visible is None:
        return listed
    names = [name.strip() for name in visible.split(",")]
    named = next((n for n, name in enumerate(names) if name in ("", "-1")), len(names))
    return named if listed is None else min(named, listed)


def num_usable_cores() -> int:
    """CPU cores that this process may use; a core with two hardware threads counts twice."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def available_host_bytes(root: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Host memory that can still be allocated, in bytes: the smaller of what the system has without
    swapping and what the limits of this process's control groups (containers) leave."""
    return int(min(psutil.virtual_memory().available, _left_by_cgroups(root, own)))


def _left_by_cgroups(root: Path, own: Path) -> float:
    """Bytes that the control groups of this process and their parents leave (cgroup version 1 or
    2); infinite without a limit."""
    try:
        entries = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return math.inf
    left = math.inf
    for number, controllers, path in (entry for entry in entries if len(entry) == 3):
        if number == "0":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            base = root / "memory"
        else:
            continue
        folder = base / path.lstrip("/")
        for group in (folder, *folder.parents):
            left = min(left, _left_in(group, *names))
            if group == base:
                break
    return left


def _left_in(group: Path, limit: str, usage: str, cached: str) -> float:
    """Bytes below the limit of one control group; its file cache counts as free."""
    try:
        most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return math.inf  # no such group here: the container does not show it
    return math.inf if most == "max" else max(int(most) - used + int(stat.get(cached, 0)), 0)
