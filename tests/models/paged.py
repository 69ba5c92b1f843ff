"""A hand-driven paged cache: feeds chosen chunks of sequences through a model."""

from __future__ import annotations

import random
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from hone.attention import PagedContext
from hone.families.registry import spec_of
from hone.models.decoder import hidden_states
from hone.segments import Segment, plan_segments


class PagedRun:
    """Feeds tokens of sequences step by step and keeps each token's hidden state.

    `forward` is that of transformers' modules by default. Blocks are handed out in random order.
    `mutate` changes ids, positions and context of each step, for planted bugs.
    """

    def __init__(
        self, model, sequences, *, forward=None, block_size=4, mutate=lambda *step: step, seed=0
    ):
        config = model.config
        self.forward = forward or partial(hidden_states, model)
        self.sequences, self.mutate, self.block_size = sequences, mutate, block_size
        self.done = [0] * len(sequences)
        self.hidden: list[list[Tensor]] = [[] for _ in sequences]
        width = max(-(-len(s) // block_size) for s in sequences)
        blocks = list(range(width * len(sequences) + 2))
        random.Random(seed).shuffle(blocks)
        self.tables = torch.tensor(
            [[blocks.pop() for _ in range(width)] for _ in sequences], dtype=torch.int32
        )
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        shape = (2, width * len(sequences) + 2, block_size, config.num_key_value_heads, head_dim)
        dtype = next(model.parameters()).dtype
        self.kv_caches = [
            torch.full(shape, 50.0, dtype=dtype) for _ in range(config.num_hidden_layers)
        ]
        self.state_rows = random.Random(seed).sample(range(len(sequences) + 2), len(sequences))
        self.states = states_of(config, len(sequences) + 2, dtype)

    @torch.inference_mode()
    def step(self, chunks: dict[int, int]) -> PagedRun:
        """Feed `chunks[i]` further tokens of sequence i, all in one forward."""
        positions = [torch.arange(self.done[i], self.done[i] + n) for i, n in chunks.items()]
        slots = [
            self.tables[i, where // self.block_size].long() * self.block_size
            + where % self.block_size
            for i, where in zip(chunks, positions, strict=True)
        ]
        sizes = tuple(chunks.values())
        lengths = tuple(self.done[i] + n for i, n in chunks.items())
        # As in an engine, a sequence's first token is prefill: its rows have states of others.
        is_decode = set(sizes) == {1} and all(self.done[i] for i in chunks)
        context = PagedContext(
            kv_caches=self.kv_caches,
            block_tables=self.tables[list(chunks)],
            slot_mapping=torch.cat(slots),
            cu_seqlens_q=torch.tensor([0, *accumulate(sizes)], dtype=torch.int32),
            context_lens=torch.tensor(lengths, dtype=torch.int32),
            max_seqlen_q=max(sizes),
            max_context_len=max(lengths),
            query_lens=() if is_decode else sizes,
            key_lens=() if is_decode else lengths,
            states=self.states,
            state_rows=torch.tensor([self.state_rows[i] for i in chunks]) if is_decode else None,
            segments=None if is_decode else plan_segments(self._segments(chunks), torch.from_numpy),
        )
        ids = torch.cat([self.sequences[i][p] for i, p in zip(chunks, positions, strict=True)])
        hidden = self.forward(*self.mutate(ids, torch.cat(positions), context))
        for i, rows in zip(chunks, hidden.split(sizes), strict=True):
            self.hidden[i].append(rows)
            self.done[i] += len(rows)
        return self

    def _segments(self, chunks: dict[int, int]) -> list[Segment]:
        """A chunk goes on with its sequence's states, and replaces them."""
        found, start = [], 0
        for i, size in chunks.items():
            row = self.state_rows[i]
            read = row if self.done[i] else None
            found.append(Segment(start, size, read=read, writes=(row,)))
            start += size
        return found

    def results(self) -> list[Tensor]:
        """Hidden states [T_i, D] of each sequence."""
        assert self.done == [len(s) for s in self.sequences], "some tokens were never fed"
        return [torch.cat(rows) for rows in self.hidden]


def states_of(config, num_rows: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor] | None]:
    """Rows of states of each recurrent layer, with values that no sequence has; none elsewhere."""
    layers = spec_of(config.model_type).recurrent_layers(config.to_dict())
    if layers is None:
        return []
    tails = (num_rows, layers.kernel_size - 1, layers.num_channels)
    heads = (num_rows, layers.num_value_heads, layers.key_dim, layers.value_dim)
    return [
        (torch.full(tails, 50.0, dtype=dtype), torch.full(heads, 50.0))
        if index in layers.indices
        else None
        for index in range(config.num_hidden_layers)
    ]
