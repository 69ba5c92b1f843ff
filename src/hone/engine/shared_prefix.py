"""Groups of running sequences that share leading KV blocks, where reading these once saves time.

Members of a group hold the very same blocks for their prompt, by the prefix cache. Decode attention
can read such blocks once for up to `SHARED_PREFIX_MEMBERS` of them instead of once for each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hone.engine.settings import MIN_SAVED, SHARED_PREFIX_MEMBERS

__all__ = ["PrefixGroups", "find_prefix_groups", "max_groups"]


@dataclass(slots=True)
class PrefixGroups:
    """Arrays of `attention.SharedPrefix`, padded to a fixed number of groups."""

    rows: NDArray[np.int32]  # [G, SHARED_PREFIX_MEMBERS] batch rows, -1 for none
    lens: NDArray[np.int32]  # [G] keys that the members share
    starts: NDArray[np.int32]  # [B] where a row's own keys begin


def max_groups(num_rows: int) -> int:
    """Most groups of at least two members among `num_rows` rows."""
    return max(num_rows // 2, 1)


def find_prefix_groups(
    tables_BN: NDArray[np.int32],
    context_lens_B: NDArray[np.int64],
    *,
    block_size: int,
    num_rows: int,
) -> PrefixGroups | None:
    """Groups among B running sequences; None where sharing would save too little.

    `tables_BN` are their block tables, `context_lens_B` their lengths with the token that the step
    writes; `num_rows >= B` is the padded size of the batch. Two tables share a block only where
    both hold it at the same place.
    """
    num_full_B = (context_lens_B - 1) // block_size  # blocks before the one that this step writes
    # Families are ordered by their first row: block ids differ from run to run, and must not
    # influence the order in which attention adds up.
    _, first_B, inverse_B = np.unique(tables_BN[:, 0], return_index=True, return_inverse=True)
    family_B = first_B[inverse_B]
    order = np.argsort(family_B, kind="stable")
    order = order[num_full_B[order] > 0]
    borders = np.flatnonzero(np.diff(family_B[order])) + 1
    found: list[tuple[NDArray[np.int64], int]] = []
    saved = 0
    for family in np.split(order, borders):
        for first in range(0, len(family), SHARED_PREFIX_MEMBERS):
            members = family[first : first + SHARED_PREFIX_MEMBERS]
            if len(members) < 2:
                continue
            size = int(num_full_B[members].min())
            tables = tables_BN[members, :size]
            equal = (tables == tables[0]).all(0)
            length = (size if equal.all() else int(equal.argmin())) * block_size
            found.append((members, length))
            saved += (len(members) - 1) * length
    if saved < MIN_SAVED * context_lens_B.sum():
        return None
    groups = PrefixGroups(
        rows=np.full((max_groups(num_rows), SHARED_PREFIX_MEMBERS), -1, np.int32),
        lens=np.zeros(max_groups(num_rows), np.int32),
        starts=np.zeros(num_rows, np.int32),
    )
    for i, (members, length) in enumerate(found):
        groups.rows[i, : len(members)] = members
        groups.lens[i] = length
        groups.starts[members] = length
    return groups
