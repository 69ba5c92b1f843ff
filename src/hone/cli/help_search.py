"""`hone COMMAND --help WORD`: search of a command's keys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hone.config.aliases import FRAMEWORKS, aliases
from hone.config.base import Section
from hone.config.schema import Field, fields, is_section, locate

__all__ = ["Hit", "search_keys"]

_WORD = re.compile(r"[a-z0-9]+")


@dataclass(frozen=True, slots=True)
class Hit:
    """A found key."""

    field: Field
    foreign: str
    """Its name in another framework if only that name matches, else empty."""


def search_keys(tree: type[Section], text: str) -> list[Hit]:
    """The keys that match all words of `text` at the beginning of a word: first by their own name,
    then by their name in another framework, then by their help text."""
    wanted = _words(text)
    if not wanted:
        return []
    foreign = _foreign_names(tree)
    ranked: list[tuple[int, Hit]] = []
    for field in fields(tree):
        if is_section(field.annotation):
            continue
        names = foreign.get(field.path, ())
        name = next((name for name in names if _has(wanted, name)), "")
        if _has(wanted, field.key):
            own = field.path[-1]
            rank = 0 if _words(own) == wanted else 1 if _has(wanted, own) else 2
            ranked.append((rank, Hit(field, "")))
        elif name:
            ranked.append((3, Hit(field, name)))
        elif _has(wanted, f"{field.key} {field.help}"):
            ranked.append((4, Hit(field, "")))
    return [hit for _, hit in sorted(ranked, key=lambda pair: pair[0])]


def _words(text: str) -> list[str]:
    """Words of a text, without a plural `s`, since only beginnings are compared."""
    words = _WORD.findall(text.lower())
    return [word.removesuffix("s") if len(word) > 3 else word for word in words]


def _has(wanted: Sequence[str], text: str) -> bool:
    given = _WORD.findall(text.lower())
    return all(any(word.startswith(want) for word in given) for want in wanted)


def _foreign_names(tree: type[Section]) -> Mapping[tuple[str, ...], list[str]]:
    """Names in other frameworks, by key."""
    names: dict[tuple[str, ...], list[str]] = {}
    for row in aliases():
        for key in row.to:
            target = locate(tree, key.replace("*", "0").split("."))
            if target is not None:
                names.setdefault(target.path, []).extend(_with_frameworks(row.names))
    return names


def _with_frameworks(names: Mapping[str, Iterable[str]]) -> list[str]:
    return [
        f"{name} ({FRAMEWORKS[framework]})" if framework in FRAMEWORKS else name
        for framework, each in names.items()
        for name in each
    ]
