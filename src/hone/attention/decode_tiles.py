"""Which tiles of keys belong to which sequence: the run of tiles that the lanes divide.

Keys of all sequences are cut into tiles and laid end to end, those of groups in a run of their own.
Lengths are on the device alone, so a program finds its place by adding them up.

This module imports triton; `hone.attention.triton_decode` imports it.
"""
# Numbers become tensors in a kernel, and constexpr parameters are what they hold.
# pyright: reportReturnType=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportUnnecessaryComparison=false

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "find_group",
    "find_sequence",
    "first_key",
    "shared_tiles",
    "tiles_before_each",
    "tiles_of",
    "tiles_of_all",
]

LENGTHS_AT_ONCE = tl.constexpr(256)
"""Sequences whose lengths a program adds up in one step; more take several."""


@triton.jit
def first_key(length: tl.tensor, start: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """The first key that a sequence reads alone, at the head of a block."""
    if S.window > 0:
        start = tl.maximum(length - S.window, 0) // S.page * S.page
    return start


@triton.jit
def tiles_of(
    context_lens_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    sequence: tl.tensor,
    mask: tl.tensor,
    S: tl.constexpr,
) -> tl.tensor:
    """Tiles that sequences read alone: at least one, as somebody must write the output."""
    length = tl.load(context_lens_ptr + sequence, mask=mask, other=0)
    start = tl.zeros_like(length)
    if starts_ptr is not None:
        start = tl.load(starts_ptr + sequence, mask=mask, other=0)
    first = first_key(length, start, S)
    return tl.where(mask, tl.maximum(tl.cdiv(length - first, S.tile), 1), 0)


@triton.jit
def tiles_of_all(
    context_lens_ptr: tl.tensor, starts_ptr: tl.tensor, batch: tl.tensor, S: tl.constexpr
) -> tl.tensor:
    """Tiles that all sequences read alone."""
    total = 0
    for base in range(0, batch, LENGTHS_AT_ONCE):
        sequence = base + tl.arange(0, LENGTHS_AT_ONCE)
        total += tl.sum(tiles_of(context_lens_ptr, starts_ptr, sequence, sequence < batch, S), 0)
    return total


@triton.jit
def tiles_before_each(
    context_lens_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    batch: tl.tensor,
    sequence: tl.tensor,
    S: tl.constexpr,
) -> tl.tensor:
    """Tiles of the sequences before each of `sequence` [N]."""
    total = tl.zeros_like(sequence)
    for base in range(0, batch, LENGTHS_AT_ONCE):
        other = base + tl.arange(0, LENGTHS_AT_ONCE)
        tiles = tiles_of(context_lens_ptr, starts_ptr, other, other < batch, S)
        total += tl.sum(tl.where(other[None, :] < sequence[:, None], tiles[None, :], 0), 1)
    return total


@triton.jit
def find_sequence(
    context_lens_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    batch: tl.tensor,
    tile: tl.tensor,
    S: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The sequence that tile number `tile` belongs to, and the number of tiles before it."""
    found, before, seen = 0, 0, 0
    for base in range(0, batch, LENGTHS_AT_ONCE):
        sequence = base + tl.arange(0, LENGTHS_AT_ONCE)
        exists = sequence < batch
        tiles = tiles_of(context_lens_ptr, starts_ptr, sequence, exists, S)
        is_before = exists & (seen + tl.cumsum(tiles, 0) <= tile)
        found += tl.sum(is_before.to(tl.int32), 0)
        before += tl.sum(tl.where(is_before, tiles, 0), 0)
        seen += tl.sum(tiles, 0)
    return found, before


@triton.jit
def shared_tiles(shared_lens_ptr: tl.tensor, groups: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """Tiles that all groups read together."""
    total = 0
    for base in range(0, groups, LENGTHS_AT_ONCE):
        group = base + tl.arange(0, LENGTHS_AT_ONCE)
        length = tl.load(shared_lens_ptr + group, mask=group < groups, other=0)
        total += tl.sum(tl.cdiv(length, S.tile), 0)
    return total


@triton.jit
def find_group(
    shared_lens_ptr: tl.tensor, groups: tl.tensor, tile: tl.tensor, S: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The group that tile number `tile` belongs to, and the number of tiles before it."""
    found, before, seen = 0, 0, 0
    for base in range(0, groups, LENGTHS_AT_ONCE):
        group = base + tl.arange(0, LENGTHS_AT_ONCE)
        exists = group < groups
        tiles = tl.cdiv(tl.load(shared_lens_ptr + group, mask=exists, other=0), S.tile)
        is_before = exists & (seen + tl.cumsum(tiles, 0) <= tile)
        found += tl.sum(is_before.to(tl.int32), 0)
        before += tl.sum(tl.where(is_before, tiles, 0), 0)
        seen += tl.sum(tiles, 0)
    return found, before
