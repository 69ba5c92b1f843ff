"""Checks of the host, without torch: versions, cores, memory, limits, disk."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import tempfile
import time
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

from packaging.requirements import Requirement  # a dependency of transformers
from packaging.specifiers import SpecifierSet

from hone.extras import installed_version, is_installed
from hone.hardware import GIB, available_host_bytes, num_usable_cores
from hone.rewards.jail import JailError, missing_walls
from hone.tools.doctor.machine import Finding, Machine, ReadingError, judge

__all__ = ["cores", "disk", "memory", "open_files", "programs", "shared_memory", "versions"]

MB = 1e6
_TOLD = ("torch", "transformers", "vllm", "ray", "flash-attn-4", "torchao")
WRITTEN_BYTES = 128 * 2**20
_WRITE_S = 4.0
SHM = Path("/dev/shm")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def versions(machine: Machine) -> Finding:
    """Compare Python and packages with hone's requirements, including installed extras."""
    installed = {name: installed_version(name) for name in _TOLD}
    known = [f"{name} {version}" for name, version in installed.items() if version is not None]
    measured = ", ".join([f"Python {platform.python_version()}", *known])
    try:
        hone = metadata("hone-rl")
    except PackageNotFoundError:
        remedy = "`pip install -e .` in the folder of hone also installs what it needs."
        return Finding("slow", measured, "hone-rl, installed", remedy)
    python = hone["Requires-Python"]
    unmet = _unmet(hone.get_all("Requires-Dist", []), hone.get_all("Provides-Extra", []))
    if unmet:
        measured = ", ".join(f"{x.name} {installed_version(x.name) or 'missing'}" for x in unmet)
    needed = ", ".join(f"{x.name} {x.specifier}" for x in unmet)
    install = " ".join(f"'{x.name}{x.specifier}'" for x in unmet)
    return judge(
        measured,
        needed or f"what hone {hone['Version']} requires, Python {python}",
        (unmet, "wrong", f"pip install {install}"),
        (
            not SpecifierSet(python).contains(platform.python_version()),
            "wrong",
            f"Make an environment with Python {python}.",
        ),
    )


def _unmet(requires: list[str], extras: list[str]) -> list[Requirement]:
    """Requirements that are missing or have another version; for extras only the latter."""
    extras = [extra for extra in extras if extra not in ("dev", "docs")]
    unmet: dict[str, Requirement] = {}
    for need in map(Requirement, requires):
        asked = [x for x in ("", *extras) if not need.marker or need.marker.evaluate({"extra": x})]
        version = installed_version(need.name)
        is_met = "" not in asked if version is None else need.specifier.contains(version, True)
        if asked and not is_met:
            unmet[need.name] = need
    return [*unmet.values()]


def cores(machine: Machine) -> Finding:
    """Compare the usable cores with processes and the threads that OpenMP would start."""
    usable, quota = num_usable_cores(), _quota()
    number = usable if quota is None else min(usable, quota)
    given = os.environ.get("OMP_NUM_THREADS", "")
    measured = f"{usable} usable{'' if quota is None else f', {quota:g} by the control group'}"
    least = (machine.max_gpus or 0) + 1
    return judge(
        f"{measured}, OMP_NUM_THREADS={given or 'unset'}",
        f"{least} or more, and no more threads",
        (number < least, "slow", "A GPU's process takes a core, and rewards one: get more cores."),
        (
            number < (int(given) if given.isdecimal() else usable),
            "slow",
            f"Threads wait for each other: OMP_NUM_THREADS={max(int(number), 1)} in the "
            "environment.",
        ),
    )


def _quota() -> float | None:
    """CPU quota of this container in cores. None without a limit."""
    try:
        most, period = CPU_QUOTA.read_text().split()
    except OSError:  # no control groups, or version 1
        return None
    return None if most == "max" else int(most) / int(period)


def memory(machine: Machine) -> Finding:
    """Check the free memory, including a container's limit."""
    free, least = available_host_bytes() / GIB, 2 * (machine.max_gpus or 1)
    return judge(
        f"{free:,.1f} GiB available",
        f"{least} GiB: 2 for torch in each process, before any weight",
        (free < least, "wrong", "End other programs, or raise the limit of the container or job."),
    )


def open_files(machine: Machine) -> Finding:
    """Check the limit of open files; Ray raises its own to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (2**63 if x == resource.RLIM_INFINITY else x for x in (soft, hard))
    least_hard = 8192 if is_installed("ray") else 1024
    remedy = "`ulimit -n 8192` before a run; `docker run --ulimit nofile=65536`; where that is "
    remedy += "refused, /etc/security/limits.conf sets the hard limit."
    return judge(
        f"{'no limit' if soft == 2**63 else f'{soft:,}'}",
        f"1,024 or more, and a hard limit of {least_hard:,} or more",
        (soft < 256, "wrong", remedy),
        (soft < 1024 or hard < least_hard, "slow", remedy),
    )


def shared_memory(machine: Machine) -> Finding | None:
    """Check /dev/shm, through which NCCL and Ray pass data between processes; hone itself does not
    use it."""
    if not SHM.exists():
        return None
    free, one_device = shutil.disk_usage(SHM).free / GIB, machine.max_gpus in (0, 1)
    return judge(
        f"{free:,.2f} GiB free",
        "1 GiB for NCCL and Ray",
        (
            free < 1 and not (one_device and not is_installed("ray")),
            "slow" if one_device else "wrong",
            "Remove what is left there, or give it more: `docker run --shm-size 16g`, in "
            "Kubernetes an emptyDir of medium Memory.",
        ),
    )


def programs(machine: Machine) -> Finding:
    """Check the sandbox walls around programs that a model wrote, which the reward `code_tests`
    runs."""
    try:
        missing = missing_walls()
    except (JailError, TimeoutError) as error:
        raise ReadingError(f"no program can be started: {error}") from None
    return judge(
        f"no wall for: {', '.join(missing)}" if missing else "all walls are up",
        "walls for secrets, signals, network, files, disk and forks",
        (
            missing,
            "slow",
            f"Only for the reward code_tests, whose programs can {'; '.join(missing.values())}. "
            "SECURITY.md says which kernel and which rights of a container each wall needs.",
        ),
    )


def disk(machine: Machine) -> Finding:
    """Check free space and write speed of the run folder's disk, with an unnamed temporary file."""
    place = next(x for x in (machine.run_dir, *machine.run_dir.absolute().parents) if x.exists())
    try:
        free = shutil.disk_usage(place).free / GIB
        rate = _write_rate(place, WRITTEN_BYTES if free > 1 else 0) / MB
    except OSError as error:
        remedy = "Set run.dir to a folder that can be written; `hone doctor --run.dir DIR` asks."
        return Finding("wrong", f"{place}: {error.strerror}", "a folder to write to", remedy)
    room = "A checkpoint takes 14 bytes a weight: free some space, or move run.dir."
    return judge(
        f"{free:,.1f} GiB free, {rate:,.0f} MB/s in {place}",
        "20 GiB free, 200 MB/s",
        (free < 1, "wrong", room),
        (free < 20, "slow", room),
        (rate < 200, "slow", "Steps that save wait for it: move run.dir to a faster disk."),
    )


def _write_rate(folder: Path, num_bytes: int) -> float:
    """Write speed to the disk in bytes per second, measured with `num_bytes` (8 MiB at least) or a
    few seconds."""
    chunk = os.urandom(2**23)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        start, written = time.perf_counter(), 0
        while True:
            written += file.write(chunk)
            os.fsync(file.fileno())
            if written >= num_bytes or time.perf_counter() > start + _WRITE_S:
                break
        return written / (time.perf_counter() - start)
