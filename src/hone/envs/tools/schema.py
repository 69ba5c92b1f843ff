"""JSON schemas of functions, from their signatures and docstrings.

The result is that of transformers' `get_json_schema`, which chat templates are written for. It is
not called: reward workers do not load transformers.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Collection, Mapping
from inspect import Parameter
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hone.errors import UserError

__all__ = ["function_schema"]

_BASIC = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null",
          list: "array", tuple: "array", dict: "object"}  # fmt: skip
_SECTIONS = ("Args:", "Returns:", "Raises:")
_ENTRY = re.compile(r"(\w+):\s*(.*)", re.DOTALL)
_TYPED_ENTRY = re.compile(r"(\w+)\s*\([^)]*\):\s*(.*)", re.DOTALL)
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*\Z", re.IGNORECASE)
_EXAMPLE = """
    def add(a: int, b: int) -> int:
        \"\"\"Add two numbers.

        Args:
            a: The first number
            b: The second number
        \"\"\""""


def function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The schema of a function or bound method, `{"type": "function", "function": {...}}`.

    Each parameter needs a type and a line in the section `Args:` of the docstring. Choices may
    follow there as `(choices: ["a", "b"])`. Raises UserError, which says what to write.
    """
    name = getattr(function, "__name__", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise UserError(
            f"a tool must be a function or method with a name, got {function!r:.80}; write a "
            "function that calls it"
        )
    parameters = _parameters(function, name)
    described, returned, texts = _docstring(function, name, parameters)
    hints = _hints(function, name)
    properties = {
        key: _property(key, hints[key], texts, name) for key in hints if key in parameters
    }
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required := [key for key, p in parameters.items() if p.default is Parameter.empty]:
        schema["required"] = required
    made = {"name": name, "description": described, "parameters": schema}
    if "return" in hints:
        made["return"] = _hint_schema(hints["return"], "what it returns", name)
        if returned is not None:
            made["return"]["description"] = returned
    return {"type": "function", "function": made}


def _parameters(function: Callable[..., Any], name: str) -> Mapping[str, Parameter]:
    parameters = inspect.signature(function).parameters
    for key, parameter in parameters.items():
        if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            raise UserError(
                f"the tool '{name}' takes `{parameter}`, and a model must be shown what it may "
                "pass; name each parameter"
            )
        if parameter.kind is Parameter.POSITIONAL_ONLY:
            raise UserError(
                f"the tool '{name}' takes '{key}' by position only, and is called with names; "
                "remove the `/` from its signature"
            )
        if parameter.annotation is Parameter.empty:
            raise UserError(f"the parameter '{key}' of the tool '{name}' has no type; {_write()}")
    return parameters


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except (NameError, TypeError, SyntaxError, AttributeError) as error:
        raise UserError(
            f"the types of the tool '{name}' cannot be read: {error}. Import what they name at the "
            "top of the file, not under TYPE_CHECKING"
        ) from error


def _property(key: str, hint: Any, texts: Mapping[str, str], name: str) -> dict[str, Any]:
    schema = _hint_schema(hint, f"the parameter '{key}'", name)
    if key not in texts:
        raise UserError(
            f"the docstring of the tool '{name}' does not describe the parameter '{key}'; "
            f"{_write()}"
        )
    text = texts[key]
    if choices := _CHOICES.search(text):
        try:
            values = json.loads(choices[1])
        except ValueError:
            values = None
        if not isinstance(values, list):
            raise UserError(
                f"the choices of the parameter '{key}' of the tool '{name}' are {choices[1]}; "
                'write a list of JSON values, as (choices: ["tea", "coffee"])'
            )
        schema["enum"] = [x.strip() if isinstance(x, str) else x for x in values]
        text = text[: choices.start()].strip()
    schema["description"] = text
    return schema


def _hint_schema(hint: Any, what: str, name: str) -> dict[str, Any]:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if origin is None:
        return {"type": _BASIC.get(hint, "object")}
    if origin is Union or origin is types.UnionType:
        return _union(args, what, name)
    if origin is Literal:
        return _literal(args, what, name)
    if origin is list:
        return {"type": "array", "items": _hint_schema(args[0], what, name)}
    if origin is tuple:
        if ... in args or len(args) == 1:
            raise UserError(
                f"{what} of the tool '{name}' has the type {hint}, which has no JSON schema; write "
                "list[...] for any number of values, or a tuple of two types or more"
            )
        return {"type": "array", "prefixItems": [_hint_schema(x, what, name) for x in args]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _hint_schema(args[1], what, name)}
    raise UserError(
        f"{what} of the tool '{name}' has the type {hint}, which has no JSON schema; allowed: str, "
        "int, float, bool, None, Any, list, tuple, dict, Literal, and unions of these"
    )


def _union(args: tuple[Any, ...], what: str, name: str) -> dict[str, Any]:
    """The schema of a union: one entry of types where all are basic, else `anyOf`."""
    schemas = [_hint_schema(x, what, name) for x in args if x is not type(None)]
    if len(schemas) == 1:
        made = schemas[0]
    elif all(schema.keys() == {"type"} for schema in schemas):
        names = sorted({schema["type"] for schema in schemas})
        made = {"type": names[0] if len(names) == 1 else names}
    else:
        made = {"anyOf": schemas}
    return made | ({"nullable": True} if type(None) in args else {})


def _literal(args: tuple[Any, ...], what: str, name: str) -> dict[str, Any]:
    if not all(type(x) in (int, float, str, bool, type(None)) for x in args):
        raise UserError(
            f"{what} of the tool '{name}' is a Literal of {args}; allowed are texts, numbers, "
            "True, False and None"
        )
    names = [*dict.fromkeys(_BASIC[type(x)] for x in args)]
    return {"type": names[0] if len(names) == 1 else names, "enum": list(args)}


def _docstring(
    function: Callable[..., Any], name: str, parameters: Collection[str]
) -> tuple[str, str | None, dict[str, str]]:
    """The description of a function, that of its result, and those of its parameters."""
    text = (inspect.getdoc(function) or "").strip()
    if not text:
        raise UserError(f"the tool '{name}' has no docstring; {_write()}")
    sections: dict[str, list[str]] = {"": []}
    lines = sections[""]
    for line in text.splitlines():
        stripped = line.strip()
        if header := next((x for x in _SECTIONS if stripped.startswith(x)), None):
            # The text of a section begins on the next line.
            lines = sections.setdefault(header, []) if stripped == header else []
        else:
            lines.append(line)
    described, returned = (
        "\n".join(sections.get(header, ())).strip() for header in ("", "Returns:")
    )
    return described, returned or None, _entries(sections.get("Args:", ()), parameters)


def _entries(lines: Collection[str], parameters: Collection[str]) -> dict[str, str]:
    """The descriptions in a section `Args:`, whose lines are joined."""
    entries: dict[str, list[str]] = {}
    key = ""
    for line in filter(None, map(str.strip, lines)):
        typed = _TYPED_ENTRY.match(line)
        if match := _ENTRY.match(line) or (typed if typed and typed[1] in parameters else None):
            key = match[1]
            entries[key] = [match[2].strip()] if match[2].strip() else []
        elif key:
            entries[key].append(line)
    return {key: " ".join(texts) for key, texts in entries.items()}


def _write() -> str:
    return f"write it as in{_EXAMPLE}"
