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
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CHUNK", "Segment", "SegmentLevel", "SegmentPlan", "plan_segments"]

CHUNK = 64
"""Tokens of a segment that are computed together, by matrix products."""

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
    """Segments of a pass that are computed together, since all their initial states are known: s
    segments with t tokens in c chunks."""

    cu_seqlens: Tensor  # [s + 1] int64, borders of the segments among these tokens
    lengths: tuple[int, ...]  # [s], host copy of the differences of cu_seqlens
    chunks: Tensor  # [c, 2] int64, each chunk's segment in the level, and its number there
    parents: Tensor | None  # [s] int64 into the final states of all earlier levels; None: level 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPlan:
    """The levels of a pass, and which stored states it reads and writes."""

    levels: tuple[SegmentLevel, ...]
    order: tuple[Tensor, Tensor] | None
    """[T] int64 each: the token of the pass at each place, where segments lie level by level, end
    to end; and the place of each token of the pass. None: tokens lie in this order already."""
    reads: tuple[Tensor, Tensor] | None = None
    """Of the first level, [r] int64 each: segments that begin with a stored state, and its row."""
    writes: tuple[Tensor, Tensor] | None = None
    """[w] int64 each: final states, numbered over all levels, and the rows that take them."""


def plan_segments(segments: Sequence[Segment], send: Send) -> SegmentPlan:
    """The plan of a pass that consists of `segments`, of which parents come before their children.
    `send` copies arrays to the device."""
    depths: list[int] = []
    for number, segment in enumerate(segments):
        assert segment.size > 0, f"{number=} {segment=}"
        assert segment.parent is None or segment.parent < number, f"{number=} {segment=}"
        depths.append(0 if segment.parent is None else depths[segment.parent] + 1)
    order = sorted(range(len(segments)), key=depths.__getitem__)  # stable
    places = {number: place for place, number in enumerate(order)}
    levels: list[SegmentLevel] = []
    for depth in range(max(depths) + 1):
        members = [segments[number] for number in order if depths[number] == depth]
        levels.append(_level(members, places, send))
    reads = [(places[n], x.read) for n, x in enumerate(segments) if x.read is not None]
    assert all(x.parent is None for x in segments if x.read is not None), f"{segments=}"
    writes = [(places[n], row) for n, x in enumerate(segments) for row in x.writes]
    return SegmentPlan(
        levels=tuple(levels),
        order=_order([segments[number] for number in order], send),
        reads=_columns(reads, send),
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


def _level(members: Sequence[Segment], places: dict[int, int], send: Send) -> SegmentLevel:
    lengths = tuple(segment.size for segment in members)
    parents = None
    if members[0].parent is not None:
        numbers = [places[x.parent] for x in members if x.parent is not None]
        parents = send(np.array(numbers, np.int64))
    counts = -(-np.array(lengths, np.int64) // CHUNK)
    which = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return SegmentLevel(
        chunks=send(np.stack([np.repeat(np.arange(len(counts)), counts), which], 1)),
        cu_seqlens=send(np.array([0, *np.cumsum(lengths)], np.int64)),
        lengths=lengths,
        parents=parents,
    )


def _columns(pairs: Sequence[tuple[int, int]], send: Send) -> tuple[Tensor, Tensor] | None:
    if not pairs:
        return None
    first, second = np.array(pairs, np.int64).T.copy()
    return send(first), send(second)
