# pyright: reportMissingImports=false
"""States of the gated delta rule from chunk to chunk, and their gradients back again.

These are the only two kernels of `fla-core` that follow a segment, so they are launched for one
level of segments after the other, over arrays of the whole pass. The package's own functions around
them allocate what they return, and would need a copy for each level.

Each of the two is compiled three times for training: for rows, for prompts and for their
completions, which differ in the states that they are given and asked for. The first pass compiles
all three, so that no later step waits for a kind that it is the first to have.

Letters: T tokens, C chunks, S segments, of which the first level has s, Hk key heads, H value
heads, K and V sizes of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from fla.ops.common.chunk_delta_h import (
    chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64,
    chunk_gated_delta_rule_fwd_kernel_h_blockdim64,
)
from torch import Tensor

from hone.segments import CHUNK, SegmentLevel, SegmentPlan

__all__ = ["ChunkTokens", "OutputGradients", "States", "pass_back", "pass_on"]


class ChunkTokens(NamedTuple):
    """Tokens of all segments, end to end, as chunks read and write their states."""

    k: Tensor  # [1, T, Hk, K], normalised
    w: Tensor  # [1, T, H, K], what states know is w h
    u: Tensor  # [1, T, H, V], values; new values are u - w h
    log2_decays: Tensor  # [1, T, H] float32, cumulated from the first token of a chunk on


class States(NamedTuple):
    """What a pass through the chunks of all segments finds."""

    h: Tensor  # [1, C, H, K, V], first state of each chunk
    new_values: Tensor  # [1, T, H, V], values less what the states know of them
    initial: tuple[Tensor | None, ...]  # of each level, first states of its segments; None: zeros
    finals: Tensor | None
    """Final states [S, H, K, V] in float32, or of the segments before the last level alone, whose
    children begin with them; None where there are none."""


class OutputGradients(NamedTuple):
    """Gradients of what was computed from states, and how: outputs are `scale` q h, and more."""

    q: Tensor  # [1, T, Hk, K], normalised
    scale: float
    do: Tensor  # [1, T, H, V], of the outputs
    new_values: Tensor  # [1, T, H, V], of the new values, by the outputs inside of their chunks
    finals: Tensor | None  # [S, H, K, V] float32, of the final states


def pass_on(
    tokens: ChunkTokens, plan: SegmentPlan, stored: Tensor | None, *, gives_final: bool
) -> States:
    """States of all chunks, from the initial states `stored` [s, H, K, V] of the first level; None:
    zeros."""
    k, w, u, log2_decays = tokens
    num_heads, key_dim, value_dim = u.shape[2], k.shape[3], u.shape[3]
    shape = num_heads, key_dim, value_dim
    h = k.new_empty(1, len(plan.chunks), *shape)
    new_values = torch.empty_like(u)
    finals, stored = None, None if stored is None else stored.contiguous()
    if num_kept := len(plan.lengths) if gives_final else _num_parents(plan):
        finals = k.new_empty(num_kept, *shape, dtype=torch.float32)

    def launch(level: SegmentLevel, begin: Tensor | None, end: Tensor | None) -> None:
        chunk_gated_delta_rule_fwd_kernel_h_blockdim64[_grid(level, num_heads, value_dim)](
            k=k,
            v=u,
            w=w,
            v_new=new_values,
            g=log2_decays,
            gk=None,
            h=h,
            h0=begin,
            ht=end,
            **_sizes(level, k, u),
        )

    if not gives_final:
        _launch_each_kind("forward", launch, plan, k, u)
    initial: list[Tensor | None] = []
    for level, segments in _levels(plan):
        begin = stored
        if level.parents is not None:
            assert finals is not None
            begin = finals[level.parents]
        is_followed = gives_final or segments.stop < len(plan.lengths)
        launch(level, begin, finals[segments] if finals is not None and is_followed else None)
        initial.append(begin)
    return States(h, new_values, tuple(initial), finals)


def pass_back(
    tokens: ChunkTokens, plan: SegmentPlan, states: States, given: OutputGradients
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the last state of each chunk [1, C, H, K, V], of the new values [1, T, H, V],
    and of the states that were stored, None where there were none."""
    k, w, _, log2_decays = tokens
    num_heads, value_dim = given.do.shape[2:]
    dh = torch.empty_like(states.h)
    d_values = torch.empty_like(given.new_values)
    d_finals = None
    if given.finals is not None:  # children add theirs to a copy
        d_finals = given.finals.float().clone(memory_format=torch.contiguous_format)
    elif num_parents := _num_parents(plan):
        shape = num_parents, *states.h.shape[2:]
        d_finals = states.h.new_zeros(shape, dtype=torch.float32)

    def launch(level: SegmentLevel, d_begin: Tensor | None, d_end: Tensor | None) -> None:
        chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64[_grid(level, num_heads, value_dim)](
            q=given.q,
            k=k,
            w=w,
            g=log2_decays,
            gk=None,
            dht=d_end,
            dh0=d_begin,
            do=given.do,
            dh=dh,
            dv=given.new_values,
            dv2=d_values,
            scale=given.scale,
            **_sizes(level, k, given.do),
        )

    _launch_each_kind("backward", launch, plan, k, given.do)
    d_initial = None
    levels = [*zip(_levels(plan), states.initial, strict=True)]
    for (level, segments), begin in reversed(levels):
        is_followed = given.finals is not None or segments.stop < len(plan.lengths)
        d_initial = None if begin is None else torch.empty_like(begin, dtype=torch.float32)
        d_end = d_finals[segments] if d_finals is not None and is_followed else None
        launch(level, d_initial, d_end)
        if level.parents is not None:
            assert d_finals is not None
            assert d_initial is not None
            # Sorted and summed, in the same order each time: `index_add_` would add as they come.
            d_finals.index_put_((level.parents,), d_initial, accumulate=True)
    return dh, d_values, d_initial


_launched: set[tuple[object, ...]] = set()
_MOST_SEGMENTS = 64
"""Enough to fill a GPU, since the package may search launch parameters with them. Their states take
64 MiB in 0.8B."""


def _launch_each_kind(
    direction: str,
    launch: Callable[[SegmentLevel, Tensor | None, Tensor | None], None],
    plan: SegmentPlan,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Launch a kernel for segments of the first level with each mix of states that training has,
    once for heads of these sizes. What it writes into the pass is written again by the pass."""
    heads = keys.device, keys.dtype, *keys.shape[2:], *values.shape[2:]
    if (direction, *heads) in _launched:
        return
    _launched.add((direction, *heads))
    first = plan.levels[0]
    some = replace(first, lengths=first.lengths[:_MOST_SEGMENTS])
    shape = len(some.lengths), values.shape[2], keys.shape[3], values.shape[3]
    begin, end = (keys.new_zeros(shape, dtype=torch.float32) for _ in range(2))
    for states in ((None, None), (None, end), (begin, None)):
        launch(some, *states)


def _num_parents(plan: SegmentPlan) -> int:
    """Number of segments before the last level, among which all parents are."""
    return len(plan.lengths) - len(plan.levels[-1].lengths)


def _levels(plan: SegmentPlan) -> Generator[tuple[SegmentLevel, slice]]:
    """Levels, each with its segments among all of them."""
    ends = [*accumulate(len(level.lengths) for level in plan.levels)]
    for level, end in zip(plan.levels, ends, strict=True):
        yield level, slice(end - len(level.lengths), end)


def _grid(
    level: SegmentLevel, num_heads: int, value_dim: int
) -> Callable[[Mapping[str, int]], tuple[int]]:
    """Programs of a launch, by the values `BV` that each serves."""
    return lambda launch: (-(-value_dim // launch["BV"]) * len(level.lengths) * num_heads,)


def _sizes(level: SegmentLevel, keys: Tensor, values: Tensor) -> dict[str, Any]:
    """Arguments that both kernels share. Borders of a level are places in the whole pass."""
    num_tokens, num_key_heads, key_dim = keys.shape[1:]
    num_heads, value_dim = values.shape[2:]
    return {
        "cu_seqlens": level.cu_seqlens,
        "chunk_offsets": level.chunk_offsets,
        "T": num_tokens,
        "H": num_key_heads,
        "HV": num_heads,
        "K": key_dim,
        "V": value_dim,
        "BT": CHUNK,
        "STATE_V_FIRST": False,
    }
