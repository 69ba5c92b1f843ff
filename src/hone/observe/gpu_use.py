"""GPU utilization as NVML counts it: the share of time in which any kernel runs.

Read by torch through the package `nvidia-ml-py`, once per second in a thread, because NVML's own
window is shorter than a step. There are no readings without the package, on a CPU, or on a device
that reports none (MIG).
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Callable

import torch

__all__ = ["GPUUse"]

INTERVAL_S = 1.0


class GPUUse:
    """Utilization of one device since the last `take`."""

    def __init__(self, read: Callable[[], float | None], interval_s: float = INTERVAL_S) -> None:
        """`read` returns the current share, 0 to 1, or None if it cannot be read."""
        self._read = read
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._readings: list[float] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hone-gpu-use", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, device: torch.device) -> GPUUse | None:
        """Start reading a device. None if it has no readings."""
        if device.type != "cuda" or importlib.util.find_spec("pynvml") is None:
            return None
        error = importlib.import_module("pynvml").NVMLError

        def read() -> float | None:
            try:
                return torch.cuda.utilization(device) / 100
            except error:
                return None

        return cls(read) if read() is not None else None

    def take(self) -> list[float]:
        """The readings since the last call, each 0 to 1."""
        with self._lock:
            taken, self._readings = self._readings, []
        return taken

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(self._interval_s):
            if (share := self._read()) is not None:
                with self._lock:
                    self._readings.append(share)
