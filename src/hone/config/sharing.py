"""Recipes that serve several commands: the keys that belong to another command.

    split = split_recipe(EvaluateConfig, values)

`hone eval`, `generate`, `serve`, `plan` and `bench` leave out what only training has, and every
command leaves out the sections of commands that do not train. A recipe with sections that `hone rl`
alone has serves `hone sft` too, each without what the other alone has; in one of demonstrations
alone a key of `hone rl` is a mistake, as is one of `hone sft` where no such section is. `hone dpo`
and `hone reward-model` have a section `algorithm` of their own, so their recipes are theirs alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.config.base import Section
from hone.config.commands import COMMANDS
from hone.config.schema import Field, fields, is_section, locate
from hone.config.tree import (
    RECIPE_COMMANDS,
    TREES,
    DPOConfig,
    RewardModelingConfig,
    RLConfig,
    SFTConfig,
)

__all__ = [
    "SAME",
    "UNREAD",
    "RecipeSplit",
    "command_of",
    "is_for_rl",
    "key_paths",
    "split_recipe",
    "training_tree",
]

_TRAINING = (RLConfig, SFTConfig, DPOConfig, RewardModelingConfig)

SAME: Mapping[str, Mapping[str, str]] = {
    name: entry.same_keys for name, entry in COMMANDS.items() if entry.same_keys
}
"""By command, keys of `hone rl` and those of the command that say the same: a recipe that lacks the
latter is sampled as its run samples."""

UNREAD: Mapping[str, tuple[str, ...]] = {
    name: entry.unread_keys for name, entry in COMMANDS.items() if entry.unread_keys
}
"""By command, keys that it has and has no use for in a recipe of another."""


@dataclass(frozen=True, slots=True)
class RecipeSplit:
    """The keys of a recipe, split by whether one command has them."""

    own: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keys of the command, and unknown keys in its sections."""
    others: dict[tuple[str, ...], Any] = field(default_factory=dict[tuple[str, ...], Any])
    """Values of keys that only other commands have, by path."""
    unknown: list[tuple[str, ...]] = field(default_factory=list[tuple[str, ...]])
    """Unknown keys in sections of other commands."""


def split_recipe(tree: type[Section], values: Mapping[str, Any]) -> RecipeSplit:
    """The keys of a recipe that the command of `tree` reads, and the others."""
    result = RecipeSplit()
    reads_past = [
        other
        for other in TREES.values()
        if other is not tree
        and (other not in _TRAINING or tree not in _TRAINING or is_for_rl(values))
    ]
    result.own.update(_own(tree, reads_past, values, (), result))
    return result


def is_for_rl(values: Mapping[str, Any]) -> bool:
    """Whether a recipe has sections that, of all training commands, only `hone rl` has."""
    return bool(values.keys() & (RLConfig.model_fields.keys() - DPOConfig.model_fields.keys()))


def _own(
    tree: type[Section],
    others: Collection[type[Section]],
    values: Mapping[str, Any],
    above: tuple[str, ...],
    result: RecipeSplit,
) -> dict[str, Any]:
    own: dict[str, Any] = {}
    is_ours = not above or locate(tree, above) is not None
    for name, value in values.items():
        path = (*above, name)
        target = locate(tree, path) or _in_others(others, path)
        if target is None and not is_ours:
            result.unknown.append(path)
        elif target is not None and is_section(target.annotation) and isinstance(value, dict):
            part = _own(tree, others, value, path, result)
            if locate(tree, path) is not None:
                own[name] = part
        elif target is None or locate(tree, path) is not None:
            own[name] = value
        else:
            result.others[path] = value
    return own


def _in_others(others: Collection[type[Section]], path: Sequence[str]) -> Field | None:
    """A key that a command leaves to these others."""
    is_trained = any(path[0] in each.model_fields for each in _TRAINING)
    for other in others:
        target = locate(other, path)
        if target is None:
            continue
        if other in _TRAINING:
            return target
        if not is_trained and is_section(other.model_fields[path[0]].annotation):
            return target
    return None


def training_tree(paths: Collection[tuple[str, ...]]) -> type[Section] | None:
    """The tree that trains and knows the most of these keys; None where none knows any."""

    def depth(tree: type[Section], path: tuple[str, ...]) -> int:
        return max(n for n in range(len(path) + 1) if not n or locate(tree, path[:n]))

    known = {tree: sum(depth(tree, path) for path in paths) for tree in _TRAINING}
    best = max(_TRAINING, key=lambda tree: known[tree])
    return best if known[best] else None


def command_of(paths: Collection[tuple[str, ...]], *, has_pairs: bool = False) -> str:
    """The command of `RECIPE_COMMANDS` that a recipe and flags with these keys are for.

    The one that knows the most of them; of equals one that trains on pairs, where the data
    `has_pairs`, then one whose required keys are all there; of these the first. Without any data
    no command can run, so that its required keys say nothing.
    """
    names_data = any(path[:1] == ("data",) for path in paths)

    def fitness(name: str) -> tuple[int, bool, bool]:
        tree = TREES[name]
        known = sum(locate(tree, path) is not None for path in paths)
        reads_pairs = has_pairs and locate(tree, _CHOSEN) is not None
        given = {path[:length] for path in paths for length in range(1, len(path) + 1)}
        needed = (key.path for key in fields(tree) if _is_needed(key.path, tree))
        return known, reads_pairs, names_data and all(path in given for path in needed)

    return max(RECIPE_COMMANDS, key=fitness)


def _is_needed(path: tuple[str, ...], tree: type[Section]) -> bool:
    found = locate(tree, path)
    return found is not None and found.required and "0" not in path


_CHOSEN = ("data", "train", "0", "columns", "chosen")


def key_paths(
    values: Mapping[str, Any], above: tuple[str, ...] = (), *, into_lists: bool = False
) -> Iterator[tuple[str, ...]]:
    """The paths of all values of a recipe. A list is one, or `into_lists` those of its entries."""
    for name, value in values.items():
        path = (*above, name)
        entries: list[Any] = value if into_lists and isinstance(value, list) else []
        sections = {str(n): entry for n, entry in enumerate(entries) if isinstance(entry, dict)}
        if isinstance(value, dict) and value:
            yield from key_paths(value, path, into_lists=into_lists)
        elif sections:
            yield from key_paths(sections, path, into_lists=into_lists)
        else:
            yield path
