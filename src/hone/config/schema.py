"""Schema of the configuration trees: keys, their types as text, and the nearest key to a wrong
one."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types as bounds
from pydantic.fields import FieldInfo

from hone.config.base import Section

__all__ = ["Field", "describe", "fields", "is_section", "locate", "members", "nearest"]


@dataclass(frozen=True, slots=True)
class Field:
    """One key of a tree, addressed by its dotted path; entries of lists have the index `0`."""

    path: tuple[str, ...]
    annotation: Any
    info: FieldInfo | None = None
    """None for entries of lists and mappings, which have no help text of their own."""

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def help(self) -> str:
        """The docstring under the field; that of the section's class where there is none."""
        text = self.info.description if self.info else None
        if text is None and is_section(self.annotation):
            text = self.annotation.__doc__
        return " ".join((text or "").split())

    @property
    def required(self) -> bool:
        return self.info is not None and self.info.is_required()

    @property
    def default(self) -> Any:
        """The value when the key is not given; None where it is required."""
        if self.info is None or self.info.is_required():
            return None
        return self.info.get_default(call_default_factory=True, validated_data={})

    @property
    def allowed(self) -> str:
        return describe(self.annotation, self.info.metadata if self.info else ())


def is_section(annotation: Any) -> bool:
    """Whether this type is a group of keys."""
    return isinstance(annotation, type) and issubclass(annotation, Section)


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, None included; other types are their own only member."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def fields(tree: type[Section], prefix: tuple[str, ...] = ()) -> Iterator[Field]:
    """All keys of a tree in order, each section before its content.

    A list of sections is followed by the keys of its first entry, with index `0`.
    """
    for name, info in tree.model_fields.items():
        path = (*prefix, name)
        yield Field(path, info.annotation, info)
        if is_section(info.annotation):
            yield from fields(_as_section(info.annotation), path)
        elif get_origin(info.annotation) is tuple and is_section(get_args(info.annotation)[0]):
            yield from fields(_as_section(get_args(info.annotation)[0]), (*path, "0"))


def locate(tree: type[Section], path: Sequence[str]) -> Field | None:
    """The key at a path, or None where the tree has no such key."""
    annotation: Any = tree
    info: FieldInfo | None = None
    for part in path:
        found = _child(annotation, part)
        if found is None:
            return None
        annotation, info = found
    return Field(tuple(path), annotation, info)


def _child(annotation: Any, part: str) -> tuple[Any, FieldInfo | None] | None:
    if is_section(annotation):
        info = _as_section(annotation).model_fields.get(part)
        return None if info is None else (info.annotation, info)
    arguments = get_args(annotation)
    if get_origin(annotation) is dict:
        return arguments[1], None
    if get_origin(annotation) is tuple and part.isdecimal():
        if arguments[-1] is Ellipsis:
            return arguments[0], None
        return (arguments[int(part)], None) if int(part) < len(arguments) else None
    return (Any, None) if annotation is Any else None


def _as_section(annotation: Any) -> type[Section]:
    assert is_section(annotation), f"{annotation=}"
    return annotation


def describe(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type and its bounds in words, for example `whole number >= 1`."""
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(str(value) for value in get_args(annotation))
    if get_origin(annotation) is Annotated:  # a pattern, which says itself what it allows
        return str(get_args(annotation)[1].description)
    if annotation is type(None):
        return "null"
    if len(members(annotation)) > 1:
        return ", or ".join(describe(member, metadata) for member in members(annotation))
    if is_section(annotation):
        return "section with the keys " + ", ".join(_as_section(annotation).model_fields)
    if get_origin(annotation) is tuple:
        first, *rest = get_args(annotation)
        if is_section(first):
            return "list of entries with the keys " + ", ".join(_as_section(first).model_fields)
        if get_origin(first) is Literal:
            return f"list of {' and '.join(get_args(first))}"
        number = "" if rest == [...] else f"{1 + len(rest)} "
        return f"list of {number}{' and '.join(_PLURALS[kind] for kind in members(first))}"
    if get_origin(annotation) is dict:
        return "mapping of names to values"
    return " ".join([_NAMES.get(annotation, "any value"), *_bounds(metadata)]).rstrip(",")


_NAMES = {bool: "true or false", int: "whole number", float: "number", str: "text", Path: "path"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}


def _bounds(metadata: Sequence[Any]) -> Iterator[str]:
    for bound in metadata:
        match bound:
            case bounds.Ge(ge=value):
                yield f">= {value},"
            case bounds.Gt(gt=value):
                yield f"> {value},"
            case bounds.Le(le=value):
                yield f"<= {value},"
            case bounds.Lt(lt=value):
                yield f"< {value},"
            case _:
                pass


def nearest(tree: type[Section], path: Sequence[str]) -> list[str]:
    """The existing keys that a wrong one most likely stands for, at most three, best first.

    The last part counts most, so a right name under a wrong section is found as well; of equals
    those that the training is set by come first. Where no key looks much alike, those whose help
    text has all words of the last part are named.
    """
    scored = [(_likeness(path, parts), ".".join(parts)) for parts in _paths_like(tree, path)]
    best = max(score for score, _ in scored)
    if best < 0.7 and len(path[-1]) > 1:
        words = set(path[-1].lower().split("_"))
        told = [x.key for x in fields(tree) if words <= set(re.findall(r"\w+", x.help.lower()))]
        if told:
            return told[:3]
    ranked = sorted(scored, key=lambda pair: (-pair[0], pair[1].startswith(_BESIDE)))
    return [key for score, key in ranked if score > 0 and score >= best - 0.02][:3]


_BESIDE = ("critic.", "teacher.", "eval.", "checkpoint.", "profile.")
"""Sections of what goes on beside the training of the policy."""


def _paths_like(tree: type[Section], path: Sequence[str]) -> Iterator[list[str]]:
    """All paths of a tree, with the list index of `path` where it has one."""
    index = next((part for part in path if part.isdecimal()), "0")
    for field in fields(tree):
        yield [index if part == "0" else part for part in field.path]


def _likeness(typed: Sequence[str], known: Sequence[str]) -> float:
    """0 for keys that are not alike, else above 0.5 and at most 1."""
    if "_".join(typed) == "_".join(known):
        return 1.0
    leaf = _similarity(typed[-1], known[-1])
    if len(typed[-1]) > 3 and known[-1].startswith(typed[-1]):
        leaf = max(leaf, 0.9)  # what was cut short is meant, rather than another word
    if leaf < 0.5:
        return 0.0
    if len(typed) == 1 < len(known):  # no section is written, so that it cannot be a wrong one
        return leaf if leaf >= 0.7 else 0.0
    score = 0.7 * leaf + 0.3 * _similarity(".".join(typed[:-1]), ".".join(known[:-1]))
    return score if score >= 0.55 else 0.0


def _similarity(left: str, right: str) -> float:
    return SequenceMatcher(None, left, right, autojunk=False).ratio() if left or right else 1.0
