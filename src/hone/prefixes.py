"""When rows of a group share their prompt in a pass, and what it saves: trainer and planner ask."""

from __future__ import annotations

from math import ceil

__all__ = ["COPIED", "saved_tokens", "saves_enough"]

COPIED = 1 / 8
"""What a token counts, in time and memory, of which a pass has the keys and values once more."""
MIN_SAVED = 1 / 16
"""Least share of its tokens that a group has to save: the keys of all of them are copied."""


def saved_tokens(prefix: int) -> int:
    """What a row that leaves out a prefix of so many tokens saves of a pass's cap."""
    return prefix - ceil(COPIED * prefix)


def saves_enough(prefix: float, num_rows: float, num_tokens: float) -> bool:
    """Whether rows of so many tokens in all share a prefix of so many."""
    return prefix > 0 and (1 - COPIED) * (num_rows - 1) * prefix >= MIN_SAVED * num_tokens
