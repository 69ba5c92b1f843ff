"""Checks of single GPUs: driver, torch, memory, rates, clocks."""

from __future__ import annotations

from collections import Counter

from hone.hardware import Peaks, gpu_peaks
from hone.tools.doctor.machine import Finding, Machine, judge

__all__ = ["clocks", "driver", "free_memory", "rates", "torch_build"]

_LEAST_FREE = 0.9
_LEAST_CLOCK = 0.6
"""Lowest healthy share of the highest clock: large matrix products reach the power limit, which
costs up to a third."""
_LEAST_RATE = {"measured": 0.85, "datasheet": 0.65}
"""Lowest healthy share of the table's rates: no program reaches those of a data sheet."""


def driver(machine: Machine) -> Finding:
    """Check that NVIDIA's driver answers and its GPUs have no memory errors."""
    if machine.max_gpus == 0:
        return Finding("ok", "no NVIDIA GPU", "none: runs take the CPU")
    reading = machine.driver
    kinds = ", ".join(f"{n} x {name}" for name, n in Counter(x.name for x in reading.gpus).items())
    bad = [f"GPU {n}" for n, x in enumerate(reading.gpus) if x.has_memory_errors]
    return judge(
        f"{reading.version}, CUDA {reading.cuda}, {kinds or 'no GPU'}"
        + (f", memory errors of {', '.join(bad)}" if bad else ""),
        "an answer, no uncorrectable memory error",
        (
            bad,
            "wrong",
            "Reboot, which maps bad memory out. If errors come back, leave the GPU out with "
            "CUDA_VISIBLE_DEVICES and have it replaced.",
        ),
    )


def torch_build(machine: Machine) -> Finding:
    """Check that torch is built for CUDA if there is a GPU, and sees all GPUs."""
    build, listed = machine.torch, machine.max_gpus
    measured = f"{build.version}, built for {f'CUDA {build.cuda}' if build.cuda else 'CPUs'}"
    if listed == 0:
        return Finding("ok", measured, "any build: there is no GPU")
    return judge(
        f"{measured}, sees {build.num_gpus} GPUs {build.problem}".strip(),
        f"built for CUDA, sees {listed or 'all'}",
        (
            build.cuda is None,
            "wrong",
            "Install a build for CUDA: pip install --force-reinstall torch, from the index that "
            "pytorch.org names for the driver.",
        ),
        (
            build.num_gpus == 0,
            "wrong",
            f"The driver must serve CUDA {build.cuda} (`nvidia-smi` says what it does): update it, "
            "or install a torch for an older CUDA. With NVSwitch `systemctl status "
            "nvidia-fabricmanager` must say active.",
        ),
        (
            build.num_gpus < (listed or 0),
            "wrong",
            "CUDA_VISIBLE_DEVICES names GPUs that are not there, or one has left the bus: compare "
            "`nvidia-smi -L`, and reboot.",
        ),
    )


def free_memory(machine: Machine) -> Finding | None:
    """Check that no other program uses memory of the GPUs."""
    if not machine.torch.num_gpus:
        return None
    shares = [device.free_share for device in machine.devices]
    used = [f"GPU {n} {share:.0%}" for n, share in enumerate(shares) if share < _LEAST_FREE]
    return judge(
        f"{', '.join(used) or f'{min(shares):.0%}'} free",
        f"{_LEAST_FREE:.0%} of each",
        (
            used,
            "wrong",
            "`nvidia-smi` lists the processes that hold it: end what is left over, or leave the "
            "GPU out with CUDA_VISIBLE_DEVICES.",
        ),
    )


def rates(machine: Machine) -> Finding | None:
    """Compare matrix and memory rates of each GPU with hone's table, while all GPUs are busy."""
    if not machine.torch.num_gpus:
        return None
    measured = machine.under_load[0]
    known = gpu_peaks(measured[0].name)
    if known is None:
        return Finding(
            "ok", _rates(measured[0]), f"not known: hone's table has no {measured[0].name}"
        )
    share = _LEAST_RATE[known.source]
    slow = [
        f"GPU {n}: {_rates(x)}"
        for n, x in enumerate(measured)
        if x.flops_per_s < share * known.flops_per_s or x.bytes_per_s < share * known.bytes_per_s
    ]
    return judge(
        "; ".join(slow) or _rates(min(measured, key=lambda x: x.flops_per_s)),
        f"{share:.0%} of {_rates(known)}, {known.source} of {known.name}",
        (
            slow,
            "slow",
            "Another program may be using it (`nvidia-smi`), or its clocks or its power limit are "
            "lowered (`nvidia-smi -q -d CLOCK,POWER`).",
        ),
    )


def _rates(peaks: Peaks) -> str:
    return f"{peaks.flops_per_s / 1e12:,.0f} TFLOP/s and {peaks.bytes_per_s / 1e12:.2f} TB/s"


def clocks(machine: Machine) -> Finding | None:
    """Check the clocks while all GPUs are busy, and the reasons if they are low."""
    if not machine.torch.num_gpus:
        return None
    numbers = {device.uuid: n for n, device in enumerate(machine.devices)}
    seen = {numbers[x.uuid]: x for x in machine.under_load[1] if x.uuid in numbers and x.max_clock}
    if not seen:
        return None
    shares = {n: x.clock / x.max_clock for n, x in seen.items()}
    faults = [f"GPU {n}: {', '.join(x.slowed_by)}" for n, x in seen.items() if x.slowed_by]
    slow = [f"GPU {n} at {share:.0%}" for n, share in shares.items() if share < _LEAST_CLOCK]
    return judge(
        "; ".join(faults or slow) or f"{min(shares.values()):.0%} of the highest",
        f"{_LEAST_CLOCK:.0%} of the highest under load, slowed by no fault",
        (faults, "wrong", "See to cooling and power: `nvidia-smi -q -d TEMPERATURE,POWER`."),
        (slow, "slow", "`nvidia-smi -rgc` unlocks clocks; `nvidia-smi -q -d POWER` has the limit."),
    )
