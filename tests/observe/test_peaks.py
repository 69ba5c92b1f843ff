"""The probe is quick and its numbers are of the right order."""

import time

import pytest
import torch

from hone.observe.peaks import device_peaks, measure_peaks


def test_cpu_peaks_are_plausible_and_quick() -> None:
    start = time.thread_time()  # others may have the core for longer
    peaks = device_peaks(torch.device("cpu"), torch.float32)
    assert time.thread_time() - start < 2.0
    assert 2e8 < peaks.bytes_per_s < 1e13
    assert 1e8 < peaks.flops_per_s < 1e14
    assert peaks.source == "measured"


def test_the_probe_measures_real_products() -> None:
    """Within a factor of four of a plain timing, on a machine that others use as well."""
    peaks = measure_peaks(torch.device("cpu"), torch.float32, budget_s=0.1)
    left = torch.ones(384, 384)
    best = min(_timed(left) for _ in range(20))
    assert peaks.flops_per_s == pytest.approx(2 * 384**3 / best, rel=3.0)


def _timed(left: torch.Tensor) -> float:
    start = time.perf_counter()
    left @ left
    return time.perf_counter() - start
