"""Assignment of a row's tokens to the ranks of the context axis."""

from __future__ import annotations

from math import lcm

__all__ = ["chunk_numbers", "padded_tokens", "token_ranges"]


def padded_tokens(num_tokens: int, *, ring: int, ulysses: int) -> int:
    """The smallest number of at least `num_tokens` tokens that `ring x ulysses` ranks can share
    equally."""
    unit = lcm(ring * ulysses, 2 * ring if ring > 1 else 1)
    return -(-num_tokens // unit) * unit


def token_ranges(
    num_tokens: int, *, ring: int, ulysses: int, ring_rank: int, ulysses_rank: int
) -> list[range]:
    """Positions of a rank's tokens in the padded row, ascending. `num_tokens` comes from
    `padded_tokens`."""
    part = num_tokens // (ring * ulysses)
    first, last = ulysses_rank * part, (ulysses_rank + 1) * part  # among those of the ring rank
    found: list[range] = []
    for tokens in _chunks(num_tokens, ring, ring_rank):
        own = tokens[max(first, 0) : max(last, 0)]
        first, last = first - len(tokens), last - len(tokens)
        if own:
            found.append(own)
    return found


def _chunks(num_tokens: int, ring: int, rank: int) -> list[range]:
    """The chunks of a ring rank. A ring of one has the row as one chunk."""
    if ring == 1:
        return [range(num_tokens)]
    size = num_tokens // (2 * ring)
    return [range(c * size, (c + 1) * size) for c in chunk_numbers(ring, rank)]


def chunk_numbers(ring: int, rank: int) -> tuple[int, int]:
    """The two of 2 x ring chunks that a ring rank has. The causal work is equal for all ranks."""
    return rank, 2 * ring - 1 - rank
