"""The attention context: data that one forward pass gives its attention layers.

A context rides in the keyword arguments of the forward, `model(..., attention_context=context)`,
and is read by `hone.attention.interface`. It says where sequences begin and end, and during
generation where their keys and values lie. Letters: T packed query tokens, S or B sequences.

Lengths exist twice, as a tensor for the kernels and as host integers: shapes are chosen from the
host copy, so that no attention call ever waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.distributed.mesh import Axis
from hone.model_input import ContentSpan
from hone.segments import SegmentPlan
from hone.types import IndexedKeys, PackedKeys, Spans

__all__ = [
    "FP8_DTYPE",
    "AttentionContext",
    "ContentFeatures",
    "ContextParallel",
    "PackedContext",
    "PagedContext",
    "SharedPrefix",
    "borders_of",
    "make_spans",
]

FP8_DTYPE = torch.float8_e4m3fn
"""Element type of a quantised KV cache."""


def borders_of(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    """Borders of sequences laid end to end, int32 [S + 1]. Does not wait for the device."""
    borders = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return borders.to(device, non_blocking=True)


def make_spans(
    found: Sequence[ContentSpan], keys: IndexedKeys, send: Callable[[NDArray[np.generic]], Tensor]
) -> Spans:
    """The spans of a pass, with the keys of each; `send` copies an array to the device."""
    sizes = [span.size for span in found]
    tokens = chain.from_iterable(range(span.place, span.place + span.size) for span in found)
    return Spans(
        index=send(np.fromiter(tokens, np.int64)),
        cu_seqlens=send(np.array([0, *accumulate(sizes)], np.int32)),
        max_seqlen=max(sizes),
        lengths=tuple(sizes),
        keys=keys,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentFeatures:
    """Features of the C content tokens of a pass, such as those of images
    (`hone.models.contents`)."""

    index: Tensor  # [C] int64 into [T]
    features: Tensor  # [C, D], in place of the embeddings of these tokens
    deepstack: Tensor | None = None  # [K, C, D], added to the output of the first K layers


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallel:
    """The processes that share a packed row, with equally many tokens each.
    `hone.attention.token_shares.token_ranges` gives a rank's tokens."""

    ring: Axis
    ulysses: Axis

    @property
    def size(self) -> int:
        return self.ring.size * self.ulysses.size


@dataclass(slots=True, kw_only=True)
class PackedContext:
    """Context of training: sequences laid end to end, causal attention within each.

    With `parallel` the forward has only this process's tokens of the row; borders and lengths are
    those of the whole row. With `keys`, sequences may begin with tokens of another one; borders and
    lengths are those of the queries, which are the last tokens of their sequence.
    """

    cu_seqlens: Tensor  # [S + 1] int32, borders, first 0 and last T
    max_seqlen: int
    lengths: tuple[int, ...]  # [S], the differences of cu_seqlens
    keys: PackedKeys | None = None
    parallel: ContextParallel | None = None
    routes: Tensor | None = (
        None  # [T, L, K] experts that each token passes again, `models/routes.py`
    )
    contents: ContentFeatures | None = None
    spans: Spans | None = None  # with `PackedKeys` of the T tokens
    segments: SegmentPlan | None = None  # of recurrent layers; None: whole sequences

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int], *, device: torch.device | str = "cpu"
    ) -> PackedContext:
        """The context of sequences of the given lengths, in packing order."""
        if not lengths or min(lengths) < 1:
            raise ValueError(f"every packed sequence needs at least one token, got {lengths=}")
        return cls(
            cu_seqlens=borders_of(lengths, device),
            max_seqlen=max(lengths),
            lengths=tuple(lengths),
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the forward on this process."""
        size = 1 if self.parallel is None else self.parallel.size
        return sum(self.lengths) // size


@dataclass(slots=True, kw_only=True)
class SharedPrefix:
    """Groups of sequences whose first keys are in the same blocks, so that decode reads them once.

    M is `SHARED_PREFIX_MEMBERS`; a larger group takes several entries, which each read the keys.
    The shared blocks are the first ones in the block table of a group's first member. A sequence
    belongs to at most one group. Shapes are fixed in a captured graph; contents may change between
    replays.
    """

    rows: Tensor  # [G, M] int32: batch rows of the members, the first ones set; -1 is no member
    lens: Tensor  # [G] int32: leading keys they share, a multiple of block_size; 0 unused group
    starts: Tensor  # [B] int32: where each row's own keys begin, its group's `lens`, else 0


@dataclass(slots=True, kw_only=True)
class PagedContext:
    """Context of generation: the newest tokens of B sequences against a paged KV cache.

    The queries of a sequence are its last tokens, so query i of n sees keys `0 .. context_len - n +
    i`. The forward first writes the keys and values of all T tokens, then attends.

    A prefill step has chunks of prompts, and their lengths on the host (`query_lens`, `key_lens`).
    A decode step has none: every sequence has one query, and T = B. It reads only tensors and the
    two maxima, so that a captured graph can be replayed with new tensor contents.
    """

    kv_caches: Sequence[Tensor]  # per layer [2, num_blocks, block_size, num_kv_heads, head_dim]
    block_tables: Tensor  # [B, max_blocks] int32; entries beyond a sequence's need are any block
    slot_mapping: Tensor  # [T] int64: block * block_size + offset; -1 writes nothing
    cu_seqlens_q: Tensor  # [B + 1] int32
    context_lens: Tensor  # [B] int32: keys visible to the last query of each sequence
    max_seqlen_q: int
    max_context_len: int
    query_lens: tuple[int, ...] = ()  # [B] host copy; a decode step has none
    key_lens: tuple[int, ...] = ()  # [B] host copy of context_lens; likewise
    kv_scales: Tensor | None = None  # [num_layers, 2, num_kv_heads] float32: value = stored * scale
    calibrate: bool = False  # prefill: set each layer's scales from this chunk before writing
    shared: SharedPrefix | None = None  # decode: read these keys once for each group
    routes: Tensor | None = None  # [slots + 1, L, K] takes the experts of each token, at its slot
    contents: ContentFeatures | None = None  # prefill
    spans: Spans | None = None  # prefill, with keys by their slots
    states: Sequence[tuple[Tensor, Tensor] | None] = ()
    """Stored states of each recurrent layer, by layer, R rows each: last inputs of the convolution
    [R, W - 1, C] and states [R, H, K, V] in float32. None for a layer with a KV cache."""
    state_rows: Tensor | None = None  # decode: [B] int64, the row of each sequence's states
    segments: SegmentPlan | None = None  # prefill, of recurrent layers
    stored_keys: tuple[Tensor, Tensor] | None = None
    """Borders [B + 1] int32 and slots [K] int64 of all K keys, for a prefill step that reads them
    from the cache. The first layer computes them for all."""
    biases: dict[int | None, Tensor] = field(default_factory=dict[int | None, Tensor])
    """Biases that attention in plain torch adds to the scores of a decode step, by window. The
    first layer computes them for all."""

    def __post_init__(self) -> None:
        num_queries = len(self.block_tables) if self.is_decode else sum(self.query_lens)
        assert num_queries == self.num_tokens, f"{num_queries=} {self.num_tokens=}"
        assert len(self.query_lens) == len(self.key_lens), f"{self.query_lens=} {self.key_lens=}"
        is_quantised = self.kv_caches[0].dtype == FP8_DTYPE
        assert is_quantised == (self.kv_scales is not None), f"{self.kv_caches[0].dtype=}"

    @property
    def num_tokens(self) -> int:
        return self.slot_mapping.shape[0]

    @property
    def is_decode(self) -> bool:
        """Whether this is a decode step: one query per sequence, no lengths on the host."""
        return not self.query_lens and not self.key_lens

    def record_routes(self, layer: int, ids: Tensor) -> None:
        """Record the experts [T, K] of a layer's tokens, if routes are recorded. `layer` is the
        position among the layers with experts. Does not wait for the device."""
        if self.routes is not None:
            # The last row takes tokens whose slot is -1.
            self.routes[self.slot_mapping, layer] = ids.to(self.routes.dtype)

    @property
    def has_prefix(self) -> bool:
        """Whether some query sees keys of an earlier step."""
        return self.is_decode or self.query_lens != self.key_lens


AttentionContext = PackedContext | PagedContext
