"""Arguments that a format writes as text: the schema of the tool says what each text means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hone.envs.tools.formats.found import Malformed, Schemas, decode_whole

__all__ = ["typed_arguments"]

_PYTHON = {"True": True, "False": False, "None": None}


def typed_arguments(name: str, texts: Mapping[str, str], schemas: Schemas) -> dict[str, Any]:
    """The arguments of a call from their texts. A text that is not of the type in the schema stays
    a text, and the check of the arguments refuses it."""
    properties = schemas.get(name, {}).get("properties")
    if not isinstance(properties, Mapping):
        properties = {}
    return {key: _typed(text, properties.get(key)) for key, text in texts.items()}


def _typed(text: str, schema: Any) -> Any:
    types = _types(schema)
    if types == {"string"}:
        return text
    stripped = text.strip()
    try:
        value = _PYTHON[stripped] if stripped in _PYTHON else decode_whole(stripped)
    except Malformed:
        return text
    if isinstance(value, str):
        # Templates write texts without quotes: with quotes it is a text that has some.
        return text if types else value
    return value if not types or _type_of(value) & types else text


def _types(schema: Any) -> set[str]:
    """The types that a schema allows; empty where it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set[str]()
    if isinstance(declared, list):
        types |= {entry for entry in declared if isinstance(entry, str)}
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else []:
            types |= _types(choice)
    if not types and isinstance(schema.get("enum"), list):
        types = {kind for entry in schema["enum"] for kind in _type_of(entry)}
    if types and schema.get("nullable"):
        types.add("null")
    return types


def _type_of(value: Any) -> set[str]:
    """The names of JSON Schema for the type of a value."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number"}
    if isinstance(value, str):
        return {"string"}
    return {"array"} if isinstance(value, list) else {"object"}
