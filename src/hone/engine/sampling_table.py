"""Sampling parameters of many sequences: on the host by slot, on the device by row of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.engine.slots import upload
from hone.types import SamplingParams

__all__ = ["SamplingBatch", "SamplingTable", "signed_64"]

_MASK = (1 << 64) - 1


def signed_64(value: int) -> int:
    """The int64 with the bits of the lowest 64 bits of `value`."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


@dataclass(slots=True)
class SamplingBatch:
    """Sampling parameters of B sequences on the device; no filters where no sequence uses one."""

    seeds: Tensor  # [B] int64
    temperatures: Tensor  # [B, 1] float32; 1 for greedy sequences
    greedy: Tensor  # [B] bool
    min_ps: Tensor | None  # [B, 1] float32
    top_ks: Tensor | None  # [B, 1] int64
    top_ps: Tensor | None  # [B, 1] float32


_RECORD = np.dtype(
    [
        ("seed", np.int64),
        ("top_k", np.int64),
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("top_p", np.float32),
        ("greedy", np.bool_),
    ],
    align=True,
)
_RECORD_WORDS = _RECORD.itemsize // 8
_OFFSETS = {name: int(field[1]) for name, field in (_RECORD.fields or {}).items()}


class SamplingTable:
    """Sampling parameters by slot, written once when a sequence gets its slot.

    The host holds them, and CUDA a copy that `flush` brings up to date, so that a captured graph
    finds there what its slots sample with. Slot `num_slots` is for padding rows: temperature 1, no
    filters.
    """

    def __init__(self, num_slots: int, *, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._records = np.zeros(num_slots + 1, _RECORD)
        self._records["top_k"] = vocab_size
        self._records["temperature"] = 1
        self._records["top_p"] = 1
        self._filtered = np.zeros(num_slots + 1, np.bool_)
        self._words = self._records.view(np.int64).reshape(-1, _RECORD_WORDS)
        self._on_device = torch.from_numpy(self._words).to(device)  # a CPU shares the memory

    def write(self, slot: int, params: SamplingParams) -> None:
        """Store the parameters of the sequence in `slot`; filters cannot change a greedy choice."""
        greedy = params.temperature == 0
        keep_all = greedy or not 0 < params.top_k < self._vocab_size
        top_k = self._vocab_size if keep_all else params.top_k
        temperature = 1.0 if greedy else params.temperature
        min_p, top_p = (0.0, 1.0) if greedy else (params.min_p, params.top_p)
        self._records[slot] = (signed_64(params.seed), top_k, temperature, min_p, top_p, greedy)
        self._filtered[slot] = min_p > 0 or top_p < 1 or not keep_all

    def flush(self) -> None:
        """Upload what was written, in the order of the current stream."""
        if self._device.type == "cuda":
            self._on_device.copy_(upload(self._words, self._device))

    def is_filtered(self, slots: NDArray[np.int64]) -> bool:
        """Whether a sequence in `slots` uses min-p, top-k or top-p."""
        return bool(self._filtered[slots].any())

    def rows(self, slots_B: Tensor, *, filtered: bool) -> SamplingBatch:
        """The parameters in `slots_B`, [B] int on the device, as they were flushed.

        One gather that a CUDA graph can capture. `filtered` must be true where `is_filtered` is.
        """
        records = self._on_device.index_select(0, slots_B)

        def column(name: str, dtype: torch.dtype) -> Tensor:
            start = _OFFSETS[name] // dtype.itemsize
            return records.view(dtype)[:, start : start + 1]

        return SamplingBatch(
            seeds=column("seed", torch.int64).squeeze(1),
            temperatures=column("temperature", torch.float32),
            greedy=column("greedy", torch.bool).squeeze(1),
            min_ps=column("min_p", torch.float32) if filtered else None,
            top_ks=column("top_k", torch.int64) if filtered else None,
            top_ps=column("top_p", torch.float32) if filtered else None,
        )
