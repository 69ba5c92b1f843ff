"""Device state of the running sequences, by slot.

A decode step reads its inputs from here and writes its results back, so the next one can be
launched before the host has seen any token of this one.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.engine.kv_cache import blocks_for
from hone.engine.sequence import Sequence
from hone.positions import PositionRule, position_shift

__all__ = ["Slots", "upload"]


def upload(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy of `values` on the device, in stream order and without waiting for it."""
    host = torch.from_numpy(values)
    # torch keeps the pinned memory until the copy is complete.
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class Slots:
    """Last token, lengths and block table of every slot, and one additional slot for padding rows.

    The padding slot has one token that is never written or attended. Where a `rule` numbers tokens,
    slots also have the difference between a sequence's positions and its indices.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        rule: PositionRule | None = None,
    ) -> None:
        self.num_slots = num_slots
        self.padding = num_slots
        self.block_size = block_size
        self.device = device
        width = blocks_for(max_model_len, block_size)
        shape = (num_slots + 1,)
        self.last_token = torch.zeros(shape, dtype=torch.int64, device=device)
        self.num_tokens = torch.ones(shape, dtype=torch.int32, device=device)
        self.num_sampled = torch.zeros(shape, dtype=torch.int64, device=device)
        self.block_tables = torch.zeros((*shape, width), dtype=torch.int32, device=device)
        self.host_tables = np.zeros((*shape, width), np.int32)
        self._sizes = [0] * num_slots
        self._rule = rule
        self._shifts = None
        if rule is not None:
            self._shifts = torch.zeros(shape, dtype=torch.int64, device=device)

    def bring_up_to_date(self, sequences: Iterable[Sequence], admitted: Iterable[Sequence]) -> None:
        """Copy the blocks that sequences got since the last call into the block tables of host and
        device."""
        for sequence in admitted:
            self._sizes[sequence.slot] = 0
        places: list[int] = []
        blocks: list[int] = []
        width = self.host_tables.shape[1]
        for sequence in sequences:
            table, slot = sequence.block_table, sequence.slot
            known = self._sizes[slot]
            if len(table) > known:
                places += range(slot * width + known, slot * width + len(table))
                blocks += table[known:]
                self._sizes[slot] = len(table)
        if not places:
            return
        changes = np.array((places, blocks), np.int64)
        self.host_tables.reshape(-1)[changes[0]] = changes[1]
        where, what = upload(changes, self.device)
        self.block_tables.view(-1).index_copy_(0, where, what.int())

    def admit(self, sequences: Iterable[Sequence]) -> None:
        """Store the difference between positions and indices of sequences that got a slot."""
        if self._rule is None or self._shifts is None:
            return
        shifts = [(x.slot, position_shift(self._rule, x.request.model_input)) for x in sequences]
        slots, values = upload(np.array(shifts, np.int64).T.copy(), self.device)
        self._shifts.index_copy_(0, slots, values)

    def positions(self, slots_B: Tensor, indices_B: Tensor) -> Tensor:
        """Positions [B] of the tokens at these indices, which must lie after all contents (images)
        of the sequences in these slots: there all axes of a rule agree. Without a rule they are the
        indices themselves."""
        return indices_B if self._shifts is None else indices_B + self._shifts[slots_B]

    def start(
        self, slots_B: Tensor, tokens_B: Tensor, num_tokens_B: Tensor, num_sampled_B: Tensor
    ) -> None:
        """Set the slots of sequences whose prefill is complete and has sampled `tokens_B`. All
        tensors are int64 on the device; counts include these tokens."""
        self.last_token.index_copy_(0, slots_B, tokens_B)
        self.num_tokens.index_copy_(0, slots_B, num_tokens_B.int())
        self.num_sampled.index_copy_(0, slots_B, num_sampled_B)
