"""What a process's device holds at most, over phases in which different things lie on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hone.hardware import GIB
from hone.observe.metrics import Max, Metrics, Min

__all__ = ["DeviceMemory", "Reading"]


class Reading(NamedTuple):
    """Of a device, in bytes."""

    free: int
    elsewhere: int
    """Taken, and not by torch's allocator: KV caches, CUDA's context, other processes."""
    peak: int
    """The most that torch's tensors took since the last reading."""


def read_gpu(device: torch.device) -> Reading:
    """Of now; begins the next peak."""
    free, total = torch.cuda.mem_get_info(device)
    elsewhere = total - free - torch.cuda.memory_reserved(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return Reading(free, elsewhere, peak)


@dataclass(slots=True)
class DeviceMemory:
    """The peak of a device, whose parts are not known at one time: torch knows the peak of its
    tensors, and of what else is taken only what is there now."""

    device: torch.device
    read: Callable[[torch.device], Reading] = read_gpu
    _peak: int = 0

    def end_phase(self) -> None:
        """To be called before what is not torch's comes or goes, such as a KV cache that sleeps."""
        if self.device.type == "cuda":
            self._end()

    def take(self) -> Metrics:
        """The least that is free now and the peak since the last call, in GiB; nothing on a
        CPU."""
        if self.device.type != "cuda":
            return {}
        free, peak, self._peak = self._end(), self._peak, 0
        return {"mem/gpu_free_gib": Min(free / GIB), "mem/gpu_peak_gib": Max(peak / GIB)}

    def _end(self) -> int:
        """End a phase; the bytes that are free."""
        reading = self.read(self.device)
        self._peak = max(self._peak, reading.peak + reading.elsewhere)
        return reading.free
