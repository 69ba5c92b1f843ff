"""Which leading tokens the rows of a group have in common, so that a pass needs them once.

    prefixes = shared_prefixes(rows)
    passes = plan(rows, prefixes=prefixes, ...)               # keeps rows of a group together
    batch = collate(some_rows, weights, device, prefixes=their_prefixes)

The first row of a group in a pass brings its prompt for all of them. Their tokens attend to copies
of its keys and values (`hone.attention.packed_keys`), and the state of its last token predicts the
first token of each. Log-probabilities and gradients are those of rows with a prompt each. A pass of
8 x (256 + 1,024) tokens has 18 % less to compute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hone.prefixes import saved_tokens, saves_enough
from hone.types import Row

__all__ = ["left_out", "pass_tokens", "shared_prefixes", "sharers_of"]


def shared_prefixes(rows: Sequence[Row]) -> list[int]:
    """For each row the number of its leading tokens, none of them trained, with which all rows of
    its group begin; 0 where leaving them out would save too little."""
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[sharers_of(row)].append(index)
    prefixes = [0] * len(rows)
    for name, members in groups.items():
        if name and len(members) > 1:
            own = [rows[i] for i in members]
            prefix = _common_prefix(own)
            if saves_enough(prefix, len(own), sum(row.num_tokens for row in own)):
                for index in members:
                    prefixes[index] = prefix
    return prefixes


def sharers_of(row: Row) -> str:
    """Name of the rows that may share a prefix with this one; empty where there are none."""
    return row.group_id or row.unit


def _common_prefix(rows: Sequence[Row]) -> int:
    starts = (row.loss_mask.index(True) if row.num_trained else row.num_tokens - 1 for row in rows)
    length = min(starts)
    heads = [row.token_ids[:length] for row in rows]
    first, last = min(heads), max(heads)  # lexicographically: all others lie between
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=True)) if a != b), length)


def pass_tokens(rows: Sequence[Row], prefixes: Sequence[int]) -> int:
    """Tokens that rows with these `shared_prefixes` take of a pass's cap."""
    return sum(row.num_tokens for row in rows) - sum(map(saved_tokens, left_out(rows, prefixes)))


def left_out(rows: Sequence[Row], prefixes: Sequence[int]) -> list[int]:
    """For each row of a pass the number of its leading tokens that a row before it brings."""
    seen: set[str] = set()
    numbers: list[int] = []
    for row, prefix in zip(rows, prefixes, strict=True):
        group = sharers_of(row)
        numbers.append(prefix if group in seen else 0)
        seen.add(group)
    return numbers
