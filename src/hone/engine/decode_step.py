"""The decode step, which CUDA graphs replay: one token for every running sequence.

Letters: B sequences, N blocks of a table.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hone.attention import PagedContext
from hone.attention.context import SharedPrefix
from hone.engine.kv_cache import KVCache, blocks_for
from hone.engine.sampler import sample
from hone.engine.sampling_table import SamplingTable
from hone.engine.sequence import Sequence
from hone.engine.settings import SHARED_PREFIX_MEMBERS
from hone.engine.shared_prefix import find_prefix_groups, max_groups
from hone.engine.slots import Slots, upload
from hone.models.generation import GenerationModel

if TYPE_CHECKING:
    from hone.engine.decode_graphs import DecodeGraphs

__all__ = ["DecodeStep", "pack"]


def pack(tokens_B: Tensor, logprobs_B: Tensor) -> Tensor:
    """Token ids and the bits of their float32 log-probabilities in one tensor [2, B] int32, so that
    one copy takes both to the host."""
    return torch.stack((tokens_B.int(), logprobs_B.view(torch.int32)))


class DecodeStep:
    """Reads the slots, runs the model, samples, and advances the slots, all on the device.

    The host sends the slots that take part only when they change.
    """

    def __init__(
        self,
        model: GenerationModel,
        cache: KVCache,
        slots: Slots,
        sampling: SamplingTable,
        *,
        max_model_len: int,
        graphs: DecodeGraphs | None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.slots = slots
        self.sampling = sampling
        self.max_model_len = max_model_len
        self.max_rows = slots.num_slots
        self.device = cache.device
        self._graphs = graphs
        # Inputs of the graphs, always at the same address.
        rows = self.max_rows
        integers = partial(torch.zeros, dtype=torch.int32, device=self.device)
        self._rows = torch.full((rows,), slots.padding, dtype=torch.int64, device=self.device)
        self._shared = SharedPrefix(
            rows=integers((max_groups(rows), SHARED_PREFIX_MEMBERS)).fill_(-1),
            lens=integers((max_groups(rows),)),
            starts=integers((rows,)),
        )
        self._borders = torch.arange(rows + 1, dtype=torch.int32, device=self.device)
        # Data of the current batch, kept while the batch stays the same.
        self._batch: list[Sequence] = []
        self._is_filtered = self._is_sharing = False

    def forget_batch(self) -> None:
        """Drop the data of the current batch. Call it when sequences got slots, since one of the
        batch may have returned in another slot."""
        self._batch = []

    def run(self, sequences: list[Sequence]) -> Tensor:
        """Launch a step; returns its samples, [2, B] as of `pack`, in transfer to the host."""
        num_rows = len(sequences)
        if self._graphs is not None:
            num_rows = self._graphs.bucket_of(num_rows, self.max_rows)
        if sequences != self._batch:
            self._set_batch(sequences, num_rows)
        compute = partial(
            self.compute, num_rows, filtered=self._is_filtered, shared=self._is_sharing
        )
        if self._graphs is None:
            longest = max(sequence.num_tokens for sequence in sequences) - 1
            output = compute(max_context_len=longest)
        else:
            key = num_rows, self._is_filtered, self._is_sharing
            if key not in self._graphs:
                self._rows.fill_(self.slots.padding)  # recording advances no sequence
                self._graphs.record(key, partial(compute, max_context_len=self.max_model_len))
                self._set_batch(sequences, num_rows)
            output = self._graphs.replay(key)
        return output[:, : len(sequences)].to("cpu", non_blocking=True)

    def compute(
        self,
        num_rows: int,
        *,
        max_context_len: int,
        filtered: bool = False,
        shared: bool = False,
    ) -> Tensor:
        """The step of the first `num_rows` rows, from device memory to device memory: [2, B]."""
        slots = self.slots
        rows_B = self._rows[:num_rows]
        is_real_B = rows_B != slots.padding
        num_tokens_B = slots.num_tokens[rows_B]
        indices_B = (num_tokens_B - 1).long()
        context = self._context(
            rows_B,
            indices_B,
            is_real_B,
            context_lens=torch.where(is_real_B, num_tokens_B, 0),
            max_context_len=max_context_len,
            shared=shared,
        )
        positions = slots.positions(rows_B, indices_B)
        hidden = self.model.hidden_states(slots.last_token[rows_B], positions, context)
        sampling = self.sampling.rows(rows_B, filtered=filtered)
        logits = self.model.logits(hidden)
        tokens_B, logprobs_B = sample(logits, sampling, slots.num_sampled[rows_B])

        slots.last_token.index_copy_(0, rows_B, tokens_B)
        slots.num_tokens.index_add_(0, rows_B, is_real_B.int())
        slots.num_sampled.index_add_(0, rows_B, is_real_B.long())
        return pack(tokens_B, logprobs_B)

    def _context(
        self,
        rows_B: Tensor,
        indices_B: Tensor,
        is_real_B: Tensor,
        *,
        context_lens: Tensor,
        max_context_len: int,
        shared: bool,
    ) -> PagedContext:
        num_rows, block_size = len(rows_B), self.cache.block_size
        tables_BN = self.slots.block_tables[rows_B, : blocks_for(max_context_len, block_size)]
        pages_B = tables_BN.gather(1, (indices_B // block_size).unsqueeze(1)).squeeze(1).long()
        kv_slots_B = pages_B * block_size + indices_B % block_size
        return PagedContext(
            kv_caches=self.cache.layers,
            kv_scales=self.cache.scales,
            block_tables=tables_BN,
            slot_mapping=torch.where(is_real_B, kv_slots_B, -1),
            cu_seqlens_q=self._borders[: num_rows + 1],
            context_lens=context_lens,
            max_seqlen_q=1,
            max_context_len=max_context_len,
            shared=self._shared_of(num_rows) if shared else None,
            routes=self.cache.routes,
            states=self.cache.states,
            state_rows=rows_B,
        )

    def _shared_of(self, num_rows: int) -> SharedPrefix:
        shared, count = self._shared, max_groups(num_rows)
        return SharedPrefix(
            rows=shared.rows[:count], lens=shared.lens[:count], starts=shared.starts[:num_rows]
        )

    def _set_batch(self, sequences: list[Sequence], num_rows: int) -> None:
        """Copy a new batch to the device: its slots, and the groups that share a prefix."""
        slots = np.full(num_rows, self.slots.padding)
        slots[: len(sequences)] = real = np.array([sequence.slot for sequence in sequences])
        self._rows[:num_rows].copy_(upload(slots, self.device), non_blocking=True)
        self._batch = sequences
        self._is_filtered = self.sampling.is_filtered(real)
        if self.device.type == "cpu":  # there, reading shared keys once is not faster
            return
        groups = find_prefix_groups(
            self.slots.host_tables[real],
            np.array([sequence.num_tokens - 1 for sequence in sequences]),
            block_size=self.cache.block_size,
            num_rows=num_rows,
        )
        self._is_sharing = groups is not None
        if groups is not None:
            target = self._shared_of(num_rows)
            target.rows.copy_(upload(groups.rows, self.device), non_blocking=True)
            target.lens.copy_(upload(groups.lens, self.device), non_blocking=True)
            target.starts.copy_(upload(groups.starts, self.device), non_blocking=True)
