"""The probe is quick and its numbers are of the right order."""

import time

import torch

from hone.observe.peaks import device_peaks, measure_peaks

PATIENCE_S = 60.0


def test_cpu_peaks_are_plausible_and_quick() -> None:
    start = time.thread_time()  # others may have the core for longer
    peaks = device_peaks(torch.device("cpu"), torch.float32)
    assert time.thread_time() - start < 2.0
    assert 2e8 < peaks.bytes_per_s < 1e13
    assert 1e8 < peaks.flops_per_s < 1e14
    assert peaks.source == "measured"


def test_the_probe_measures_real_products() -> None:
    """At most four times what a plain timing finds once others leave the core to it."""
    peaks = measure_peaks(torch.device("cpu"), torch.float32, budget_s=0.1)
    left = torch.ones(384, 384)
    best, deadline = _timed(left), time.monotonic() + PATIENCE_S
    while peaks.flops_per_s > 4 * 2 * 384**3 / best and time.monotonic() < deadline:
        best = min(best, _timed(left))
    assert 0 < peaks.flops_per_s <= 4 * 2 * 384**3 / best


def _timed(left: torch.Tensor) -> float:
    start = time.perf_counter()
    left @ left
    return time.perf_counter() - start
