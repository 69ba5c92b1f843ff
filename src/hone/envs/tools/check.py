"""Checks the arguments of a call against the JSON schema of its tool.

A schema of a server may use all of JSON Schema. Names, types, choices and bounds are checked, which
can be explained to the policy in a sentence. The rest is for the tool itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hone.errors import did_you_mean

__all__ = ["argument_problem"]

_BOUNDS = {
    "minimum": (lambda value, bound: value >= bound, "at least"),
    "maximum": (lambda value, bound: value <= bound, "at most"),
    "exclusiveMinimum": (lambda value, bound: value > bound, "more than"),
    "exclusiveMaximum": (lambda value, bound: value < bound, "less than"),
}


def argument_problem(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str | None:
    """Why a tool with the schema `schema` cannot be called with `arguments`, as a sentence for the
    policy, or None. An argument that the schema does not name is a problem, unless it sets
    `additionalProperties`."""
    properties = _mapping(schema.get("properties"))
    known = ", ".join(properties) or "none"
    if not schema.get("additionalProperties"):
        for name in arguments:
            if name not in properties:
                hint = did_you_mean(name, properties)
                return f"there is no argument '{name}'.{hint} Arguments: {known}."
    for name in _list(schema.get("required")):
        if name not in arguments:
            return f"the argument '{name}' is missing. Arguments: {known}."
    for name, value in arguments.items():
        rule = properties.get(name, schema.get("additionalProperties"))
        if problem := _problem(value, rule, f"'{name}'"):
            return problem
    return None


def _problem(value: Any, schema: Any, where: str) -> str | None:
    """Why a value does not fit a schema, or None. Where the schema is no object, nothing is
    checked."""
    if not isinstance(schema, Mapping) or (value is None and schema.get("nullable")):
        return None
    for union in ("anyOf", "oneOf"):
        if choices := _list(schema.get(union)):
            problems = [_problem(value, choice, where) for choice in choices]
            if all(problems):
                return " ".join(map(str, problems))
    return (
        _type_problem(value, schema, where)
        or _choice_problem(value, schema, where)
        or _bound_problem(value, schema, where)
        or _inner_problem(value, schema, where)
    )


def _type_problem(value: Any, schema: Mapping[str, Any], where: str) -> str | None:
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else declared
    if not _list(names) or any(_is_of(value, name) for name in _list(names)):
        return None
    return f"{where} must be of type {' or '.join(map(str, _list(names)))}, got {_shown(value)}."


def _choice_problem(value: Any, schema: Mapping[str, Any], where: str) -> str | None:
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(choices, list) or any(_equal(value, choice) for choice in choices):
        return None
    hint = (
        did_you_mean(value, [x for x in choices if isinstance(x, str)])
        if isinstance(value, str)
        else ""
    )
    return f"{where} must be one of {_shown(choices)}, got {_shown(value)}.{hint}"


def _bound_problem(value: Any, schema: Mapping[str, Any], where: str) -> str | None:
    if not _is_of(value, "number"):
        return None
    for key, (fits, words) in _BOUNDS.items():
        bound = schema.get(key)
        if (
            isinstance(bound, int | float)
            and not isinstance(bound, bool)
            and not fits(value, bound)
        ):
            return f"{where} must be {words} {bound}, got {_shown(value)}."
    return None


def _inner_problem(value: Any, schema: Mapping[str, Any], where: str) -> str | None:
    if isinstance(value, list):
        first = _list(schema.get("prefixItems"))
        for place, entry in enumerate(value):
            rule = first[place] if place < len(first) else schema.get("items")
            if problem := _problem(entry, rule, f"{where}[{place}]"):
                return problem
    if isinstance(value, dict):
        properties = _mapping(schema.get("properties"))
        for name in _list(schema.get("required")):
            if name not in value:
                return f"{where} has no '{name}'."
        others = schema.get("additionalProperties")
        for name, entry in value.items():
            if name not in properties and others is False:
                return f"{where} has no place for '{name}'.{did_you_mean(name, properties)}"
            if problem := _problem(entry, properties.get(name, others), f"{where}['{name}']"):
                return problem
    return None


def _list(value: Any) -> list[Any]:
    """A keyword's value that must be a list; an empty list where a server wrote something else."""
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _is_of(value: Any, name: Any) -> bool:
    """Whether a value is of a type of JSON Schema. Types that it does not have, which
    `get_json_schema` writes for images and audio, fit any value. A number such as 3.0 is no
    integer: it would reach a function that counts with it."""
    if name == "null":
        return value is None
    if name == "boolean":
        return isinstance(value, bool)
    if name == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if name == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    kinds = {"string": str, "array": list, "object": dict}
    return isinstance(value, kinds[name]) if name in kinds else True


def _equal(value: Any, choice: Any) -> bool:
    """Whether two values are equal in JSON, where true is not 1."""
    return isinstance(value, bool) == isinstance(choice, bool) and value == choice


def _shown(value: Any) -> str:
    if isinstance(value, Sequence) and len(value) > 50:
        value = value[:50]
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:100]}..."
