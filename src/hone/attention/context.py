"""What one forward pass tells its attention layers.

A context rides in the keyword arguments of the forward, `model(..., attention_context=context)`,
and is read by `hone.attention.interface`. It says where sequences begin and end, and during
generation where their keys and values lie. Letters: T packed query tokens, S or B sequences.

Lengths exist twice, as a tensor for the kernels and as host integers: shapes are chosen from the
host copy, so that no attention call ever waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

__all__ = ["AttentionContext", "PackedContext", "PagedContext"]


@dataclass(slots=True, kw_only=True)
class PackedContext:
    """Training: sequences laid end to end, causal attention within each."""

    cu_seqlens: Tensor  # [S + 1] int32, borders, first 0 and last T
    max_seqlen: int
    lengths: tuple[int, ...]  # [S], the differences of cu_seqlens

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int], *, device: torch.device | str = "cpu"
    ) -> PackedContext:
        """The context of sequences of the given lengths, in packing order."""
        if not lengths or min(lengths) < 1:
            raise ValueError(f"every packed sequence needs at least one token, got {lengths=}")
        borders = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(
            cu_seqlens=borders.to(device, non_blocking=True),
            max_seqlen=max(lengths),
            lengths=tuple(lengths),
        )

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


@dataclass(slots=True, kw_only=True)
class PagedContext:
    """Generation: the newest tokens of B sequences against a paged KV cache.

    The queries of a sequence are its last tokens, so query i of n sees keys
    `0 .. context_len - n + i` (a chunk of a prompt, or with n = 1 a decode step). The forward first
    writes the keys and values of all T tokens, then attends.

    A pure decode step (`max_seqlen_q == 1`) reads tensors and the two maxima only, never the
    host tuples: replaying it from a captured graph needs nothing but new tensor contents.
    """

    kv_caches: Sequence[Tensor]  # per layer [2, num_blocks, block_size, num_kv_heads, head_dim]
    block_tables: Tensor  # [B, max_blocks] int32; entries beyond a sequence's need are any block
    slot_mapping: Tensor  # [T] int64: block * block_size + offset; -1 writes nothing
    cu_seqlens_q: Tensor  # [B + 1] int32
    context_lens: Tensor  # [B] int32: keys visible to the last query of each sequence
    max_seqlen_q: int
    max_context_len: int
    query_lens: tuple[int, ...] = ()  # [B] host copy; required when max_seqlen_q > 1
    key_lens: tuple[int, ...] = ()  # [B] host copy of context_lens; required likewise

    def __post_init__(self) -> None:
        batch = self.block_tables.shape[0]
        if self.max_seqlen_q > 1 and not (len(self.query_lens) == len(self.key_lens) == batch):
            raise ValueError(
                "a prefill step (max_seqlen_q > 1) needs query_lens and key_lens as host integers, "
                f"one a sequence: got {len(self.query_lens)} and {len(self.key_lens)} for {batch}"
            )
        if self.query_lens and sum(self.query_lens) != self.num_tokens:
            raise ValueError(
                f"query_lens add up to {sum(self.query_lens)}, slot_mapping has {self.num_tokens}"
            )

    @property
    def num_tokens(self) -> int:
        return self.slot_mapping.shape[0]

    @property
    def is_decode(self) -> bool:
        """Every sequence brings exactly one query."""
        return self.max_seqlen_q == 1

    @property
    def has_prefix(self) -> bool:
        """Some query sees keys that were written by an earlier step."""
        return self.is_decode or self.query_lens != self.key_lens


AttentionContext = PackedContext | PagedContext
