"""Compile-time shape of the decode kernel, and the assignment of key tiles to sequences.

The keys of all sequences are cut into tiles and laid end to end; those of groups have a run of
their own. Lengths are only on the device, so a program finds its place by adding them up. This
module imports triton; `hone.attention.triton_decode` imports it.
"""
# Numbers become tensors in a kernel, and constexpr parameters are what they hold.
# pyright: reportReturnType=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportUnnecessaryComparison=false

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

__all__ = [
    "DecodeShape",
    "dot_rows",
    "find_group",
    "find_sequence",
    "first_key",
    "power_of_two",
    "shared_tiles",
    "tiles_before_each",
    "tiles_of",
    "tiles_of_all",
]

MIN_DOT_ROWS = 16
LENGTHS_AT_ONCE = tl.constexpr(256)
"""Number of sequences whose lengths a program adds up in one step; more take several steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeShape:
    """Numbers that are fixed when the kernel is compiled; its functions take them as S."""

    num_kv_heads: int
    heads_per_key: int  # query heads that share a key head
    head_dim: int
    page: int  # keys of a block
    members: int  # sequences that read shared keys together, 1 without
    is_fp8: bool
    window: int  # keys that a query sees, 0 for all
    softcap: float  # 0 for none
    tile: int  # keys a step

    @property
    def block_dim(self) -> int:
        """Columns of the tiles that hold a head."""
        return 1 << (max(self.head_dim, MIN_DOT_ROWS) - 1).bit_length()


@triton.constexpr_function
def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


@triton.constexpr_function
def dot_rows(rows: int) -> int:
    """Rows of a tile that the matrix units need for `rows` rows."""
    return max(MIN_DOT_ROWS, 1 << (rows - 1).bit_length())


@triton.jit
def first_key(length: tl.tensor, start: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """The first key that a sequence reads alone, at the head of a block."""
    if S.window > 0:
        start = tl.maximum(length - S.window, 0) // S.page * S.page
    return start


@triton.jit
def tiles_of(
    lengths: tl.tuple,
    sequence: tl.tensor,
    mask: tl.tensor,
    S: tl.constexpr,
) -> tl.tensor:
    """Number of tiles that each sequence reads alone: at least one, since a program must write the
    output."""
    context_lens_ptr, starts_ptr = lengths
    length = tl.load(context_lens_ptr + sequence, mask=mask, other=0)
    start = tl.zeros_like(length)
    if starts_ptr is not None:
        start = tl.load(starts_ptr + sequence, mask=mask, other=0)
    first = first_key(length, start, S)
    return tl.where(mask, tl.maximum(tl.cdiv(length - first, S.tile), 1), 0)


@triton.jit
def tiles_of_all(lengths: tl.tuple, batch: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """Total number of tiles that sequences read alone."""
    total = 0
    for base in range(0, batch, LENGTHS_AT_ONCE):
        sequence = base + tl.arange(0, LENGTHS_AT_ONCE)
        total += tl.sum(tiles_of(lengths, sequence, sequence < batch, S), 0)
    return total


@triton.jit
def tiles_before_each(
    lengths: tl.tuple,
    batch: tl.tensor,
    sequence: tl.tensor,
    S: tl.constexpr,
) -> tl.tensor:
    """Number of tiles of all sequences before each of `sequence` [N]."""
    total = tl.zeros_like(sequence)
    for base in range(0, batch, LENGTHS_AT_ONCE):
        other = base + tl.arange(0, LENGTHS_AT_ONCE)
        tiles = tiles_of(lengths, other, other < batch, S)
        total += tl.sum(tl.where(other[None, :] < sequence[:, None], tiles[None, :], 0), 1)
    return total


@triton.jit
def find_sequence(
    lengths: tl.tuple,
    batch: tl.tensor,
    tile: tl.tensor,
    S: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The sequence that tile number `tile` belongs to, and the number of tiles before it."""
    found, before, seen = 0, 0, 0
    for base in range(0, batch, LENGTHS_AT_ONCE):
        sequence = base + tl.arange(0, LENGTHS_AT_ONCE)
        exists = sequence < batch
        tiles = tiles_of(lengths, sequence, exists, S)
        is_before = exists & (seen + tl.cumsum(tiles, 0) <= tile)
        found += tl.sum(is_before.to(tl.int32), 0)
        before += tl.sum(tl.where(is_before, tiles, 0), 0)
        seen += tl.sum(tiles, 0)
    return found, before


@triton.jit
def shared_tiles(shared_lens_ptr: tl.tensor, groups: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """Total number of tiles that groups read."""
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
