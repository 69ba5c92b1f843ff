"""Peak memory of a process's device, over phases with different contents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hone.hardware import GIB
from hone.observe.metrics import Max, Metrics, Min

__all__ = ["DeviceMemory", "Reading"]


class Reading(NamedTuple):
    """A reading of a device's memory, in bytes."""

    free: int
    elsewhere: int
    """Used outside of torch's allocator: KV caches, CUDA's context, other processes."""
    peak: int
    """Peak of torch's tensors since the last reading."""


def read_gpu(device: torch.device) -> Reading:
    """Read the memory now, and reset torch's peak."""
    free, total = torch.cuda.mem_get_info(device)
    elsewhere = total - free - torch.cuda.memory_reserved(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return Reading(free, elsewhere, peak)


@dataclass(slots=True)
class DeviceMemory:
    """Tracker of a device's peak memory.

    Its parts are not measured at the same time: torch knows the peak of its own tensors, but of
    other memory only the current use is known.
    """

    device: torch.device
    read: Callable[[torch.device], Reading] = read_gpu
    _peak: int = 0

    def end_phase(self) -> None:
        """End a phase. Call it before memory outside of torch changes, such as a KV cache that is
        freed."""
        if self.device.type == "cuda":
            self._end()

    def take(self) -> Metrics:
        """Free memory now and peak use since the last call, in GiB. Empty on a CPU."""
        if self.device.type != "cuda":
            return {}
        free, peak, self._peak = self._end(), self._peak, 0
        return {"mem/gpu_free_gib": Min(free / GIB), "mem/gpu_peak_gib": Max(peak / GIB)}

    def _end(self) -> int:
        """End a phase. Returns the free bytes."""
        reading = self.read(self.device)
        self._peak = max(self._peak, reading.peak + reading.elsewhere)
        return reading.free
