"""A hand-driven paged cache: feeds chosen chunks of sequences through a model."""

from __future__ import annotations

import random
from itertools import accumulate

import torch
from torch import Tensor

from hone.attention import PagedContext
from hone.models.decoder import head_logits, hidden_states


class PagedRun:
    """Feeds tokens of sequences step by step and keeps each token's log-probabilities.

    Blocks are handed out in random order. `mutate` changes each step's context, for planted bugs.
    """

    def __init__(self, model, sequences, *, block_size=4, mutate=lambda context: context, seed=0):
        config = model.config
        self.model, self.sequences, self.mutate = model, sequences, mutate
        self.block_size = block_size
        self.done = [0] * len(sequences)
        self.logprobs: list[list[Tensor]] = [[] for _ in sequences]
        width = max(-(-len(s) // block_size) for s in sequences)
        blocks = list(range(width * len(sequences) + 2))
        random.Random(seed).shuffle(blocks)
        self.tables = [[blocks.pop() for _ in range(width)] for _ in sequences]
        shape = (2, width * len(sequences) + 2, block_size, config.num_key_value_heads)
        self.kv_caches = [
            torch.full((*shape, config.head_dim), 50.0) for _ in range(config.num_hidden_layers)
        ]

    @torch.inference_mode()
    def step(self, chunks: dict[int, int]) -> None:
        """Feed `chunks[i]` further tokens of sequence i, all in one forward."""
        ids, positions, slots = [], [], []
        for i, size in chunks.items():
            where = range(self.done[i], self.done[i] + size)
            ids += self.sequences[i][where.start : where.stop].tolist()
            positions += where
            slots += [self._slot(i, t) for t in where]
            self.done[i] += size
        sizes, lengths = tuple(chunks.values()), tuple(self.done[i] for i in chunks)
        context = PagedContext(
            kv_caches=self.kv_caches,
            block_tables=torch.tensor([self.tables[i] for i in chunks], dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            cu_seqlens_q=torch.tensor([0, *accumulate(sizes)], dtype=torch.int32),
            context_lens=torch.tensor(lengths, dtype=torch.int32),
            max_seqlen_q=max(sizes),
            max_context_len=max(lengths),
            query_lens=sizes,
            key_lens=lengths,
        )
        hidden = hidden_states(
            self.model, torch.tensor(ids), torch.tensor(positions), self.mutate(context)
        )
        rows = head_logits(self.model, hidden).log_softmax(-1).split(sizes)
        for i, logprobs in zip(chunks, rows, strict=True):
            self.logprobs[i].append(logprobs)

    def results(self) -> list[Tensor]:
        assert self.done == [len(s) for s in self.sequences], "some tokens were never fed"
        return [torch.cat(rows) for rows in self.logprobs]

    def _slot(self, sequence: int, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        return self.tables[sequence][block] * self.block_size + offset
