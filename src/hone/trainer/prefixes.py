"""Prefix sharing in training: the prompt of a group is computed once a pass.

    prefixes = shared_prefixes(rows)
    passes = plan(rows, prefixes=prefixes, ...)               # keeps rows of a group together
    batch = collate(some_rows, weights, device, prefixes=their_prefixes)

The first row of a group in a pass brings the prompt for all rows of the group. Their tokens attend
to copies of its keys and values (`hone.attention.packed_keys`), and the state of its last token
predicts the first token of each. Log-probabilities and gradients are those of rows that each have
the prompt, which ends where rows replay other routes (`hone.models.routes`). A pass of
8 x (256 + 1,024) tokens has 18 % less to compute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hone.algorithms.rows import episodes_of
from hone.model_input import inside_of, same_until
from hone.prefixes import saved_tokens, saves_enough
from hone.types import Row

__all__ = ["left_out", "pass_tokens", "shared_prefixes", "sharers_of"]


def shared_prefixes(rows: Sequence[Row]) -> list[int]:
    """For each row the length of the untrained prefix that it shares with its group: the one that
    the first rows of all episodes have in common. 0 where sharing it would save too little, and for
    a later row of an episode, whose history was rewritten, that does not begin with it."""
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[sharers_of(row)].append(index)
    prefixes = [0] * len(rows)
    for name, members in groups.items():
        if name and len(members) > 1:
            prefix, sharing = _shared(rows, members)
            num_tokens = sum(rows[i].num_tokens for i in sharing)
            if saves_enough(prefix, len(sharing), num_tokens):
                for index in sharing:
                    prefixes[index] = prefix
    return prefixes


def _shared(rows: Sequence[Row], members: Sequence[int]) -> tuple[int, list[int]]:
    """Length of the prefix that rows of a group share, and the indices of these rows."""
    first = {members[own[0]] for own in episodes_of([rows[i] for i in members])}
    prefix = _common_prefix([rows[i] for i in members if i in first])
    one = rows[members[0]]
    return prefix, [i for i in members if i in first or _common_prefix([one, rows[i]]) >= prefix]


def sharers_of(row: Row) -> str:
    """Name of the group of rows that may share a prefix with this one; empty where there is
    none."""
    return row.group_id or row.unit


def _common_prefix(rows: Sequence[Row]) -> int:
    starts = (row.loss_mask.index(True) if row.num_trained else row.num_tokens - 1 for row in rows)
    length = min(starts)
    heads = [row.token_ids[:length] for row in rows]
    first, last = min(heads), max(heads)  # lexicographically: all others lie between
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=True)) if a != b), length)
    same = same_until((row.model_input for row in rows), same)
    same = _same_routes(rows, same)
    # The tokens of an image may see each other in both directions, so that they stay together.
    inside = inside_of(rows[0].model_input, same)
    return same if inside is None else inside.start


def _same_routes(rows: Sequence[Row], limit: int) -> int:
    """The number of tokens, at most `limit`, before the first that passes other experts in one row
    than in another: the samples of a prompt may have begun under different weights, as where some
    were carried over to the next step."""
    first, *others = rows
    for row in others if "routes" in first.columns else ():
        own, wanted = (one.column("routes")[:limit].sort(-1).values for one in (row, first))
        differs = (own != wanted).flatten(1).any(1).nonzero()
        limit = int(differs[0]) if len(differs) else limit
    return limit


def pass_tokens(rows: Sequence[Row], prefixes: Sequence[int]) -> int:
    """Number of tokens that rows with these `shared_prefixes` count towards a pass's cap."""
    return sum(row.num_tokens for row in rows) - sum(map(saved_tokens, left_out(rows, prefixes)))


def left_out(rows: Sequence[Row], prefixes: Sequence[int]) -> list[int]:
    """For each row of a pass the number of its leading tokens that an earlier row of the pass
    brings."""
    seen: set[str] = set()
    numbers: list[int] = []
    for row, prefix in zip(rows, prefixes, strict=True):
        group = sharers_of(row)
        numbers.append(prefix if group in seen else 0)
        if prefix:
            seen.add(group)
    return numbers
