"""Settings of other frameworks: the table `aliases.yaml`, and hints made from it.

    alias_hint(RLConfig, ["actor", "ppo_mini_batch_size"])

The message about an unknown key looks here first, and only then for a key that is spelt alike,
since the names of two different things often are (`ppo_mini_batch_size` and `micro_batch_size`).
`hone import` reads the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hone.config.base import Section
from hone.config.recipe import read_recipe_list
from hone.config.schema import fields, locate
from hone.config.tree import TREES

__all__ = ["FRAMEWORKS", "Alias", "alias_hint", "aliases", "find_alias", "of_other_command"]

FRAMEWORKS: Mapping[str, str] = {
    "openrlhf": "OpenRLHF",
    "verl": "verl",
    "relax": "Relax",
    "trl": "TRL",
}
"""Frameworks that `hone import` reads: their names in the table, and as people write them."""

_TABLE = Path(__file__).with_name("aliases.yaml")
_SOURCES = (*FRAMEWORKS, "others")
_LISTS = ("to", "off")


@dataclass(frozen=True, slots=True)
class Alias:
    """A row of the table: what serves some settings of other frameworks here. The head of the table
    says what each part means."""

    names: Mapping[str, tuple[str, ...]]
    """Ends of dotted paths by framework; `x.*` stands for all paths below x."""
    to: tuple[str, ...] = ()
    always: str = ""
    missing: str = ""
    off: tuple[Any, ...] = ()
    by: str = ""
    map: Mapping[str, Any] | None = None
    note: str = ""
    differs: str | Mapping[str, str] = ""
    when: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def words(self) -> str:
        """Text of a hint where hone has no such key."""
        return (
            f"not served yet: {self.missing}" if self.missing else f"nothing to set: {self.always}"
        )


@cache
def aliases() -> tuple[Alias, ...]:
    """The rows of the table, in order."""
    return tuple(_row(row) for row in read_recipe_list(_TABLE))


def _row(row: Mapping[str, Any]) -> Alias:
    parts = {key: value for key, value in row.items() if key not in _SOURCES}
    for key in _LISTS:
        value = parts.get(key, ())
        parts[key] = tuple(value) if isinstance(value, list | tuple) else (value,)
    return Alias(names={key: tuple(row[key].split()) for key in _SOURCES if key in row}, **parts)


@cache
def _by_name(framework: str) -> Mapping[str, Alias]:
    return {name: row for row in aliases() for name in row.names.get(framework, ())}


def find_alias(framework: str, path: Sequence[str]) -> tuple[str, Alias] | None:
    """The row for a setting of a framework, and the name that it was found by; None where the table
    has none."""
    names = _by_name(framework)
    found = [name for name in _names_of(path) if name in names]
    best = max(found, key=_rank, default=None)
    return None if best is None else (best, names[best])


def _rank(name: str) -> tuple[int, bool]:
    """The name of most parts counts, and of as many that of a whole section."""
    return len(name.removesuffix(".*").split(".")), name.endswith(".*")


def _names_of(path: Sequence[str]) -> Iterator[str]:
    parts = [part.lower().replace("-", "_") for part in path]
    for start in range(len(parts)):
        yield ".".join(parts[start:])
        for end in range(start + 1, len(parts)):
            yield f"{'.'.join(parts[start:end])}.*"


def alias_hint(tree: type[Section], path: Sequence[str], *, dashes: str = "") -> str | None:
    """What a message about the unknown key `path` of `tree` says of it, keys with `dashes` before
    them; None where no other framework has a setting of that name."""
    found = {who: pair for who in _SOURCES if (pair := find_alias(who, path))}
    best = max((_rank(name) for name, _ in found.values()), default=None)
    if best == (1, False) and _is_begun(tree, path):
        return None
    rows = {
        who: row
        for who, (name, row) in found.items()
        if _rank(name) == best and not _is_own(tree, name)
    }
    if "others" in rows:
        rows = {"others": rows["others"]}
    served = [row for row in rows.values() if row.to]
    if not served:
        return "; ".join(dict.fromkeys(row.words for row in rows.values())) or None
    whose: dict[str, list[str]] = {}
    for who, row in rows.items():
        for key in dict.fromkeys(_in_tree(tree, key) for key in row.to):
            if key is not None:
                whose.setdefault(key, []).append(FRAMEWORKS.get(who, who))
    if not whose:
        keys = dict.fromkeys(key.replace("*", "0") for row in served for key in row.to)
        other = next((name for name, its in TREES.items() if _in_tree(its, next(iter(keys)))), "rl")
        return f"it is {' or '.join(keys)} in `hone {other}`; this command has no such setting"
    differ = len({*map(tuple, whose.values())}) > 1
    told = [
        f"{dashes}{key}" + (f" ({', '.join(names)})" if differ else "")
        for key, names in whose.items()
    ]
    note = next((row.note for row in served if row.note), "")
    is_first = not differ and _in_tree(tree, served[0].to[0]) == served[0].to[0]
    return f"did you mean {' or '.join(told)}?{f' ({note})' if note and is_first else ''}"


def _is_begun(tree: type[Section], path: Sequence[str]) -> bool:
    """Whether a key of the section that is written begins so: `rollout.prompts`."""
    *section, last = path
    begun = (*section, f"{last}_")
    return bool(section) and any(
        field.path[:-1] == begun[:-1] and field.path[-1].startswith(begun[-1])
        for field in fields(tree)
    )


def _is_own(tree: type[Section], name: str) -> bool:
    """Whether a key of ours has this name, in whatever section: what is spelt alike is meant. Keys
    of list entries do not count, since nobody writes them without their list."""
    return name in tree.model_fields or any(
        name == field.path[-1] and "0" not in field.path for field in fields(tree)
    )


def of_other_command(tree: type[Section], path: Sequence[str]) -> str | None:
    """What a message about the unknown key `path` of `tree` says where other commands have it; None
    where none does, and where this one has a key of that name in another section."""
    if any(field.path[-1] == path[-1] for field in fields(tree)):
        return None
    names = [f"`hone {name}`" for name, other in TREES.items() if locate(other, path)]
    return f"it is a key of {', '.join(names)}, not of this command" if names else None


def _in_tree(tree: type[Section], key: str) -> str | None:
    """The key, or that of the same name in another section, as commands that sample have."""
    path = key.replace("*", "0").split(".")
    if locate(tree, path) is not None:
        return ".".join(path)
    return next((field.key for field in fields(tree) if field.path[-1] == path[-1]), None)
