"""Dotted flags in all their spellings.

`--a.b v`, `--a.b=v`, `a.b=v`, and a dash for an underscore anywhere in a name. Switches need no
value: `--a.flag`, `--a.flag true`, `--no-a.flag`, `--a.no-flag`. Lists and mappings are written
inline, as in YAML (`--data.train '[{path: x.jsonl}]'`), or entry by entry
(`--data.train.0.path x.jsonl`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from hone.config.base import Section
from hone.config.recipe import parse_value
from hone.config.schema import Field, locate, members
from hone.config.unknown import unknown_key

__all__ = ["Flag", "parse_flags"]

_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}


@dataclass(frozen=True, slots=True)
class Flag:
    """One value given on the command line."""

    path: tuple[str, ...]
    value: Any
    origin: str
    """The flag as it was typed, for messages."""


def parse_flags(tree: type[Section], flags: Sequence[str]) -> tuple[list[Flag], dict[str, str]]:
    """Read flags; returns them in order, and the problems found, by key."""
    parsed: list[Flag] = []
    problems: dict[str, str] = {}
    words = list(flags)
    while words:
        word = words.pop(0)
        name, has_value, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") and not has_value:
            is_key = locate(tree, name.split(".")) is not None
            hint = f"; did you mean --{word}?" if is_key else ""
            problems.setdefault(
                word, f"not a flag; the recipe goes first, flags are `--key value`{hint}"
            )
            continue
        following = _following(words)
        target, switched_off = _find(tree, name)
        if target is None:
            key = name.replace("-", "_")
            hint = unknown_key(tree, key.split("."), dashes="--")
            problems.setdefault(key, f"unknown key (flag {word}); {hint}")
            if not has_value and following is not None:
                words.pop(0)
            continue
        if has_value:
            value, origin = text, word
        elif following is not None and not (switched_off or _is_assignment(tree, following)):
            value, origin = words.pop(0), f"{word} {following}"
        elif _is_switch(target):
            value, origin = "true", word
        else:
            problems.setdefault(target.key, f"{word} needs a value; allowed: {target.allowed}")
            continue
        try:
            parsed.append(
                Flag(target.path, _convert(target, value, switched_off), f"flag {origin}")
            )
        except ValueError as error:
            problems.setdefault(target.key, f"got '{value}' (flag {origin}): {error}")
    return parsed, problems


def _following(words: Sequence[str]) -> str | None:
    """The next word where it can be a value; one that starts with `--` needs `--key=--value`."""
    return words[0] if words and not words[0].startswith("--") else None


def _is_assignment(tree: type[Section], word: str) -> bool:
    name, has_value, _ = word.partition("=")
    return bool(has_value) and _find(tree, name)[0] is not None


def _find(tree: type[Section], name: str) -> tuple[Field | None, bool]:
    """The field a flag names, and whether its spelling switches it off."""
    path = name.replace("-", "_").split(".")
    if (target := locate(tree, path)) is not None:
        return target, False
    for position in {0, len(path) - 1}:
        positive = [*path]
        positive[position] = path[position].removeprefix("no_")
        target = locate(tree, positive)
        if positive != path and target is not None and _is_switch(target):
            return target, True
    return None, False


def _is_switch(target: Field) -> bool:
    return bool in members(target.annotation)


def _convert(target: Field, text: str, switched_off: bool) -> Any:
    """A flag's text as the field's type wants it; pydantic has the last word."""
    if _is_switch(target) and text.lower() in _TRUE | _FALSE:
        return (text.lower() in _TRUE) is not switched_off
    if switched_off:
        raise ValueError("a switch takes true or false")
    if _is_text(target) and not (text.lower() in ("null", "none") and _is_optional(target)):
        return text
    return None if text == "none" and _is_optional(target) else parse_value(text)


def _is_optional(target: Field) -> bool:
    return type(None) in members(target.annotation)


def _is_text(target: Field) -> bool:
    """Whether every value of this field is text, so that `007` and `true` are taken as they are."""
    kinds = [member for member in members(target.annotation) if member is not type(None)]
    return all(
        kind in (str, Path)
        or (get_origin(kind) is Annotated and get_args(kind)[0] is str)
        or (get_origin(kind) is Literal and all(isinstance(x, str) for x in get_args(kind)))
        for kind in kinds
    )
