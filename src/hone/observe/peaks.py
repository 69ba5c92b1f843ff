"""Measured bandwidth and matrix throughput of devices without a data sheet, above all CPUs."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from hone.hardware import Peaks, gpu_peaks

__all__ = ["device_peaks", "measure_peaks"]


def device_peaks(device: torch.device, dtype: torch.dtype) -> Peaks:
    """Peaks from the table of known GPUs for bfloat16, otherwise measured. Measuring takes up to
    0.3 s: keep the result."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        known = gpu_peaks(torch.cuda.get_device_name(device))
        if known is not None:
            return known
    return measure_peaks(device, dtype)


@torch.no_grad()
def measure_peaks(device: torch.device, dtype: torch.dtype, *, budget_s: float = 0.25) -> Peaks:
    """Measure a device: the best of several copies and matrix products within `budget_s` seconds.

    The copy exceeds any cache: it reads and writes 64 MiB, on a GPU 256 MiB. torch's current number
    of threads is used, so the peaks are those of the process and not of the machine.
    """
    on_gpu = device.type == "cuda"
    num_bytes, width = (1 << 28, 8192) if on_gpu else (1 << 26, 512)

    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _best_time_s(lambda: target.copy_(source), device, budget_s / 2)

    left = torch.ones(width, width, dtype=dtype, device=device)
    product = torch.empty_like(left)
    matmul_s = _best_time_s(lambda: torch.mm(left, left, out=product), device, budget_s / 2)

    name = (
        torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    )
    return Peaks(name, 2 * num_bytes / copy_s, 2 * width**3 / matmul_s, "measured")


def _best_time_s(work: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Shortest of the runs that fit into the budget, in seconds. At least two; the first one warms
    up."""

    def timed() -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    deadline = time.perf_counter() + budget_s
    timed()
    best = timed()
    while time.perf_counter() + best < deadline:
        best = min(best, timed())
    return best
