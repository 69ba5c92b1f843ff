"""What a decode kernel is built for.

This module imports triton; the modules of the decode kernel import it.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton

__all__ = ["DecodeShape", "dot_rows", "power_of_two"]

MIN_DOT_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeShape:
    """Numbers that are fixed when the kernel is compiled; every function of it takes them as S."""

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
    """The smallest that is not smaller."""
    return 1 << (number - 1).bit_length()


@triton.constexpr_function
def dot_rows(rows: int) -> int:
    """Rows of the tile that a product on the matrix units takes for so many."""
    return max(MIN_DOT_ROWS, 1 << (rows - 1).bit_length())
