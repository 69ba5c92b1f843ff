"""Contexts of sequences that share a beginning."""

from __future__ import annotations

import torch

from hone.attention.context import PackedContext, borders_of
from hone.types import PackedKeys


def branching(num_branches: int = 3) -> PackedContext:
    """A trunk of 5 tokens, of which the first 3 are those of branches, then a sequence by itself,
    and branches of all 4 of its tokens."""
    packed, places, start = [5], [list(range(5))], 5
    for branch in range(num_branches):
        own = 1 + branch % 3
        packed.append(own)
        places.append([0, 1, 2, *range(start, start + own)])
        start += own
    trunk = list(range(start, start + 4))
    packed.append(4)
    places.append(trunk)
    start += 4
    for own in (2, 1):
        packed.append(own)
        places.append([*trunk, *range(start, start + own)])
        start += own
    index = torch.tensor([token for own in places for token in own])
    counts = torch.bincount(index)
    lengths = tuple(map(len, places))
    return PackedContext(
        cu_seqlens=borders_of(packed, "cpu"),
        max_seqlen=max(packed),
        lengths=tuple(packed),
        keys=PackedKeys(
            index=index,
            cu_seqlens=borders_of(lengths, "cpu"),
            max_seqlen=max(lengths),
            lengths=lengths,
            uses=index.argsort(stable=True).int(),
            uses_starts=torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int(),
        ),
    )
