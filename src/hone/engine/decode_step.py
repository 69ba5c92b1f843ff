"""One token, or several verified ones, for every running sequence: the part that graphs replay.

Letters: B sequences, K drafted tokens a sequence, Q = K + 1 queries, N blocks of a table.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.attention import PagedContext
from hone.attention.context import SHARED_PREFIX_MEMBERS, SharedPrefix
from hone.engine.decode_graphs import DecodeGraphs, bucket_of
from hone.engine.kv_cache import KVCache, blocks_for
from hone.engine.sampler import sample
from hone.engine.sampling_table import SamplingBatch, SamplingTable
from hone.engine.sequence import Sequence
from hone.engine.shared_prefix import find_prefix_groups, max_groups
from hone.engine.slots import MAX_DRAFTS, Slots, upload
from hone.models.generation import GenerationModel

__all__ = ["DecodeStep", "pack"]


def pack(tokens: Tensor, logprobs: Tensor, num_rows: int) -> Tensor:
    """Token ids and the bits of their float32 log-probabilities: [2, B, Q] int32, one copy."""
    return torch.stack((tokens.int(), logprobs.view(torch.int32))).view(2, num_rows, -1)


class DecodeStep:
    """Reads the slots, runs the model, samples, and advances the slots, all on the device.

    The host says which slots take part, and what to verify; both only when they change.
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
        self._drafts = integers((rows, MAX_DRAFTS), dtype=torch.int64)
        self._draft_sizes = integers((rows,))
        self._shared = SharedPrefix(
            rows=integers((max_groups(rows), SHARED_PREFIX_MEMBERS)).fill_(-1),
            lens=integers((max_groups(rows),)),
            starts=integers((rows,)),
        )
        self._borders = torch.arange(rows + 1, dtype=torch.int32, device=self.device)
        self._offsets = torch.arange(MAX_DRAFTS + 1, device=self.device)
        # What is known of the batch while it stays the same.
        self._batch: list[Sequence] = []
        self._batch_slots = np.empty(0, np.int64)
        self._host_sampling: SamplingBatch | None = None
        self._is_filtered = self._is_sharing = False

    def forget_batch(self) -> None:
        """To be called when sequences got slots: one of the batch may be back in another."""
        self._batch = []

    def run(self, sequences: list[Sequence], drafts_BK: NDArray[np.int64] | None) -> Tensor:
        """Launch a step; `drafts_BK` has the tokens to verify, -1 after the last of a row.

        Returns what was sampled for every query, [2, B, Q] as `pack` makes it, on its way to the
        host. Rows advance by the drafted tokens that hold, and one.
        """
        num_rows = len(sequences)
        if self._graphs is not None:
            num_rows = bucket_of(num_rows, self.max_rows)
        if sequences != self._batch:
            self._set_batch(sequences, num_rows)
        num_drafts = 0 if drafts_BK is None else self._set_drafts(drafts_BK)
        shared = self._is_sharing and not num_drafts
        compute = partial(
            self.compute,
            num_rows,
            num_drafts=num_drafts,
            filtered=self._is_filtered,
            shared=shared,
        )
        if self._graphs is None:
            longest = max(sequence.num_tokens for sequence in sequences) - 1 + num_drafts
            sampling = self._sampling_of_queries(num_drafts)
            output = compute(max_context_len=longest, sampling=sampling)
        else:
            key = num_rows, num_drafts, self._is_filtered, shared
            if key not in self._graphs:
                self._rows.fill_(self.slots.padding)  # nothing is advanced while recording
                longest = self.max_model_len + num_drafts
                self._graphs.record(key, partial(compute, max_context_len=longest))
                self._set_batch(sequences, num_rows)
            output = self._graphs.replay(key)
        return output[:, : len(sequences)].to("cpu", non_blocking=True)

    def compute(
        self,
        num_rows: int,
        *,
        max_context_len: int,
        num_drafts: int = 0,
        filtered: bool = False,
        shared: bool = False,
        sampling: SamplingBatch | None = None,
    ) -> Tensor:
        """The step of the first `num_rows` rows, from device memory to device memory.

        `sampling` is gathered from the table where it is not given. Returns [2, B, Q].
        """
        slots, num_queries = self.slots, num_drafts + 1
        rows_B = self._rows[:num_rows]
        is_real_B = rows_B != slots.padding
        num_tokens_B = slots.num_tokens[rows_B]
        offsets_Q = self._offsets[:num_queries]
        ids_BQ = slots.last_token[rows_B].unsqueeze(1)
        drafts_BK = self._drafts[:num_rows, :num_drafts]
        sizes_B1 = self._draft_sizes[:num_rows].unsqueeze(1)
        writes_BQ = is_real_B.unsqueeze(1)
        if num_drafts:
            ids_BQ = torch.cat((ids_BQ, drafts_BK), 1)
            writes_BQ = writes_BQ & (offsets_Q <= sizes_B1)
        positions_BQ = (num_tokens_B - 1).long().unsqueeze(1) + offsets_Q
        context = self._context(
            rows_B,
            positions_BQ,
            writes_BQ,
            context_lens=torch.where(is_real_B, num_tokens_B + num_drafts, 0),
            max_context_len=max_context_len,
            shared=shared,
        )
        hidden = self.model.hidden_states(ids_BQ.flatten(), positions_BQ.flatten(), context)
        if sampling is None:
            queries = rows_B if num_queries == 1 else rows_B.repeat_interleave(num_queries)
            sampling = self.sampling.rows(queries, filtered=filtered)
        sampled_BQ = slots.num_sampled[rows_B].unsqueeze(1) + offsets_Q
        tokens, logprobs = sample(self.model.logits(hidden), sampling, sampled_BQ.flatten())

        tokens_BQ = tokens.view(num_rows, num_queries)
        num_new_B = torch.ones_like(rows_B)
        if num_drafts:
            holds_BK = (tokens_BQ[:, :-1] == drafts_BK) & (offsets_Q[:-1] < sizes_B1)
            num_new_B = num_new_B + holds_BK.long().cumprod(1).sum(1)
        last_B = tokens_BQ.gather(1, (num_new_B - 1).unsqueeze(1)).squeeze(1)
        num_new_B = num_new_B * is_real_B
        slots.last_token.index_copy_(0, rows_B, last_B)
        slots.num_tokens.index_add_(0, rows_B, num_new_B.int())
        slots.num_sampled.index_add_(0, rows_B, num_new_B)
        return pack(tokens, logprobs, num_rows)

    def _context(
        self,
        rows_B: Tensor,
        positions_BQ: Tensor,
        writes_BQ: Tensor,
        *,
        context_lens: Tensor,
        max_context_len: int,
        shared: bool,
    ) -> PagedContext:
        (num_rows, num_queries), block_size = positions_BQ.shape, self.cache.block_size
        tables_BN = self.slots.block_tables[rows_B, : blocks_for(max_context_len, block_size)]
        pages_BQ = tables_BN.gather(1, positions_BQ // block_size).long()
        kv_slots_BQ = pages_BQ * block_size + positions_BQ % block_size
        borders = self._borders[: num_rows + 1]
        return PagedContext(
            kv_caches=self.cache.layers,
            kv_scales=self.cache.scales,
            block_tables=tables_BN,
            slot_mapping=torch.where(writes_BQ, kv_slots_BQ, -1).flatten(),
            cu_seqlens_q=borders if num_queries == 1 else borders * num_queries,
            context_lens=context_lens,
            max_seqlen_q=num_queries,
            max_context_len=max_context_len,
            shared=self._shared_of(num_rows) if shared else None,
        )

    def _shared_of(self, num_rows: int) -> SharedPrefix:
        shared, count = self._shared, max_groups(num_rows)
        return SharedPrefix(
            rows=shared.rows[:count], lens=shared.lens[:count], starts=shared.starts[:num_rows]
        )

    def _set_batch(self, sequences: list[Sequence], num_rows: int) -> None:
        """Bring a new batch to the device: its slots, and who shares a prefix."""
        slots = np.full(num_rows, self.slots.padding)
        slots[: len(sequences)] = real = np.array([sequence.slot for sequence in sequences])
        self._rows[:num_rows].copy_(upload(slots, self.device), non_blocking=True)
        self._batch, self._batch_slots, self._host_sampling = sequences, real, None
        self._is_filtered = self.sampling.is_filtered(real)
        if self.device.type == "cpu":  # where reading keys once is not faster
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

    def _set_drafts(self, drafts_BK: NDArray[np.int64]) -> int:
        """Bring drafts to the device; returns their number K. Rows of padding keep theirs."""
        num_rows, num_drafts = drafts_BK.shape
        sizes = (drafts_BK >= 0).sum(1, dtype=np.int32)
        tokens = upload(np.maximum(drafts_BK, 0), self.device)
        self._drafts[:num_rows, :num_drafts].copy_(tokens, non_blocking=True)
        self._draft_sizes[:num_rows].copy_(upload(sizes, self.device), non_blocking=True)
        return num_drafts

    def _sampling_of_queries(self, num_drafts: int) -> SamplingBatch | None:
        """On a CPU the parameters of all queries, chosen on the host and kept while the batch stays
        the same, which most steps it does. None on CUDA, where the step gathers them itself."""
        if self.device.type != "cpu":
            return None
        if num_drafts:
            return self.sampling.select(self._batch_slots.repeat(num_drafts + 1))
        if self._host_sampling is None:
            self._host_sampling = self.sampling.select(self._batch_slots)
        return self._host_sampling
