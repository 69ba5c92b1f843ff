"""Differences between the configurations or environments of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["DASH", "differences", "flat"]

DASH = "\N{EN DASH}"
_UNSET = str(None)


def flat(tree: Any, prefix: str = "") -> dict[str, str]:
    """Flatten a tree to values by dotted keys: `{"data.train.0.path": "a.jsonl"}`."""
    match tree:
        case Mapping():
            items = list(tree.items())
        case list() | tuple():
            items = list(enumerate(tree))
        case _:
            items = []
    if not items:  # a value; an empty list counts as one
        return {prefix: str(tree)} if prefix else {}
    values: dict[str, str] = {}
    for key, value in items:
        values |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return values


def differences(trees: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """`[key, value in each tree]` of the keys whose values are not equal in all trees.

    A dash stands for a missing key, which equals an unset one. Trees without any key are ignored.
    """
    known = [tree for tree in trees if tree]
    keys = dict.fromkeys(key for tree in known for key in tree)
    return [
        [key, *(tree.get(key, DASH) for tree in trees)]
        for key in keys
        if len({tree.get(key, _UNSET) for tree in known}) > 1
    ]
