"""Segments: the parts of a pass that recurrent layers compute one after the other.

A layer of gated linear attention reads a sequence from its first token to its last and keeps a
state. Sequences with a common prompt share the state at its end, so a pass is cut where a state is
needed: the prompt is one segment, and each completion begins with the prompt's final state.

    segments = [Segment(0, 40), Segment(40, 90, parent=0), Segment(130, 70, parent=0)]
    plan = plan_segments(segments, send)       # two levels: the prompt, then both completions

Trainer and engine describe a pass in this way; `hone.attention.recurrent` computes it. This module
does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BEFORE", "CHUNK", "Segment", "SegmentLevel", "SegmentPlan", "plan_segments"]

CHUNK = 64
"""Tokens of a segment that are computed together, by matrix products."""
BEFORE = 3
"""Inputs before a segment that a convolution reads at most: all families have kernels of four."""

Send = Callable[[NDArray[Any]], "Tensor"]
"""Copies an array to the device, without waiting for it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `start .. start + size` of a pass, at least one."""

    start: int
    size: int
    parent: int | None = None
    """Number of the earlier segment whose final state is its initial state."""
    read: int | None = None
    """Row of the stored states with its initial state. Without parent and row the state is zero."""
    writes: tuple[int, ...] = ()
    """Rows of the stored states that take its final state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLevel:
    """Segments of a pass whose states are computed together, since all their initial states are
    known: s of its S segments."""

    cu_seqlens: Tensor  # [s + 1] int64, borders of the segments among all tokens, level by level
    chunk_offsets: Tensor  # [s] int64, number of each segment's first chunk among all chunks
    lengths: tuple[int, ...]  # [s], host copy of the differences of cu_seqlens
    parents: Tensor | None  # [s] int64, numbers of their parents among all segments; None: level 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPlan:
    """What layers have to know of a pass of S segments with T tokens in C chunks. Segments are
    numbered level by level, and their tokens lie end to end in this order."""

    levels: tuple[SegmentLevel, ...]
    cu_seqlens: Tensor  # [S + 1] int64, borders of the segments
    lengths: tuple[int, ...]  # [S], host copy of the differences of cu_seqlens
    chunks: Tensor  # [C, 2] int64, each chunk's segment, and its number there
    order: tuple[Tensor, Tensor] | None
    """[T] int64 each: the token of the pass at each place, and the place of each token of the pass.
    None: tokens lie in this order already."""
    before: tuple[Tensor, Tensor] | None = None
    """The `BEFORE` inputs before each segment, as far as they are tokens of the pass, [n] int64
    each: numbers among the S * BEFORE inputs, and the places of the tokens."""
    reads: tuple[Tensor, Tensor] | None = None
    """Of the first level, [r] int64 each: segments that begin with a stored state, and its row."""
    before_reads: tuple[Tensor, Tensor] | None = None
    """Where states are read, the other inputs before segments, [m] int64 each: numbers among the
    S * BEFORE inputs, and numbers among the s * BEFORE stored inputs of the first level."""
    writes: tuple[Tensor, Tensor] | None = None
    """[w] int64 each: numbers of segments, and the rows that take their final states."""


def plan_segments(segments: Sequence[Segment], send: Send) -> SegmentPlan:
    """The plan of a pass that consists of `segments`, of which parents come before their children.
    `send` copies arrays to the device."""
    depths: list[int] = []
    for number, segment in enumerate(segments):
        assert segment.size > 0, f"{number=} {segment=}"
        assert segment.parent is None or segment.parent < number, f"{number=} {segment=}"
        depths.append(0 if segment.parent is None else depths[segment.parent] + 1)
    assert all(x.parent is None for x in segments if x.read is not None), f"{segments=}"
    order = sorted(range(len(segments)), key=depths.__getitem__)  # stable
    places = {number: place for place, number in enumerate(order)}
    ordered = [segments[number] for number in order]
    parents = np.array([-1 if x.parent is None else places[x.parent] for x in ordered])
    lengths = np.array([x.size for x in ordered])
    counts = -(-lengths // CHUNK)
    borders, chunk_offsets = (np.concatenate([[0], np.cumsum(x)]) for x in (lengths, counts))
    levels = np.concatenate([[0], np.cumsum(np.bincount(depths))])
    chunks = np.arange(counts.sum()) - np.repeat(chunk_offsets[:-1], counts)
    reads = [(places[n], x.read) for n, x in enumerate(segments) if x.read is not None]
    writes = [(places[n], row) for n, x in enumerate(segments) for row in x.writes]
    before = _inputs_before(borders, parents, levels).flatten()
    (tokens,), (others,) = np.nonzero(before >= 0), np.nonzero(before < 0)
    cu_seqlens, is_one = send(borders), len(levels) == 2
    return SegmentPlan(
        levels=tuple(
            SegmentLevel(
                # Sent apart, not cut on the device: kernels are compiled anew for arrays that do
                # not begin at a multiple of 16 bytes.
                cu_seqlens=cu_seqlens if is_one else send(borders[first : last + 1].copy()),
                chunk_offsets=send(chunk_offsets[first:last].copy()),
                lengths=tuple(lengths[first:last].tolist()),
                parents=send(parents[first:last].copy()) if first else None,
            )
            for first, last in pairwise(levels.tolist())
        ),
        cu_seqlens=cu_seqlens,
        lengths=tuple(lengths.tolist()),
        chunks=send(np.stack([np.repeat(np.arange(len(counts)), counts), chunks], 1)),
        order=_order(ordered, send),
        before=(send(tokens), send(before[tokens])) if len(tokens) else None,
        reads=_columns(reads, send),
        before_reads=(send(others), send(-1 - before[others])) if reads else None,
        writes=_columns(writes, send),
    )


def _order(segments: Sequence[Segment], send: Send) -> tuple[Tensor, Tensor] | None:
    """The order of a plan whose segments lie end to end as they come."""
    tokens = np.concatenate([np.arange(x.start, x.start + x.size) for x in segments])
    tokens = tokens.astype(np.int64)
    numbers = np.arange(len(tokens))
    if (tokens == numbers).all():
        return None
    places = np.empty_like(tokens)
    places[tokens] = numbers
    return send(tokens), send(places)


def _inputs_before(
    borders: NDArray[Any], parents: NDArray[Any], levels: NDArray[Any]
) -> NDArray[Any]:
    """The `BEFORE` inputs before each segment, [S, BEFORE]: the places of tokens. -1 - n is input n
    of those before the segments of the first level, which are no tokens of the pass."""
    before = -1 - np.arange((len(borders) - 1) * BEFORE).reshape(-1, BEFORE)
    after = borders[1:, None] + np.arange(-BEFORE, 0)
    sizes = np.diff(borders)
    for first, last in pairwise(levels.tolist()):
        if first:
            before[first:last] = after[parents[first:last]]
        for number in first + np.flatnonzero(sizes[first:last] < BEFORE):
            size = sizes[number]
            after[number, : BEFORE - size] = before[number, size:]
    return before


def _columns(pairs: Sequence[tuple[int, int]], send: Send) -> tuple[Tensor, Tensor] | None:
    if not pairs:
        return None
    first, second = np.array(pairs, np.int64).T.copy()
    return send(first), send(second)
