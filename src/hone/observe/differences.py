"""In what configurations or environments of runs differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

__all__ = ["DASH", "differences", "flat"]

DASH = "\N{EN DASH}"
_UNSET = str(None)


def flat(tree: Any, prefix: str = "") -> dict[str, str]:
    """Values of a tree by dotted keys: `{"data.train.0.path": "a.jsonl"}`."""
    match tree:
        case Mapping():
            items = list(tree.items())
        case list() | tuple():
            items = list(enumerate(tree))
        case _:
            items = []
    if not items:  # a value, or an empty list, which is one too
        return {prefix: str(tree)} if prefix else {}
    found: dict[str, str] = {}
    for key, value in items:
        found |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def differences(
    trees: Sequence[Mapping[str, str]],
    *,
    ignored: Collection[str] = (),
    only_common: bool = False,
) -> list[list[str]]:
    """`[key, value in each tree]` of keys whose values are not equal in all; a dash stands for a
    key that a tree lacks, which is no difference from one that is unset. Trees without any key are
    not compared; with `only_common` neither are keys that not all others have."""
    known = [tree for tree in trees if tree]
    keys = dict.fromkeys(key for tree in known for key in tree if key not in ignored)
    if only_common:
        keys = dict.fromkeys(key for key in keys if all(key in tree for tree in known))
    return [
        [key, *(tree.get(key, DASH) for tree in trees)]
        for key in keys
        if len({tree.get(key, _UNSET) for tree in known}) > 1
    ]
