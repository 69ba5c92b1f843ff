"""Typed reading of the fields of a JSON body, with errors that name the field."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import orjson

from hone.door.nesting import MAX_DEPTH, is_deep
from hone.door.refusal import Refusal

__all__ = ["Fields", "read_json", "wrong"]

_MOST_TEXTS, _LONGEST_TEXT = 64, 1024
"""Each token of an answer is compared with all stop strings, by the thread that serves all."""

_MAX_SEED = 2**63
_MAX_ID = 2**31
"""Tokenizers and tensors take no larger ids."""


class Fields:
    """The fields of an object. A field that is null counts as absent."""

    def __init__(self, values: Mapping[str, Any], above: str = "") -> None:
        """`above` is the path of the object in the body, as `messages[0]`."""
        self._values, self._above = values, above

    def path(self, name: str) -> str:
        """The path of a field in the body."""
        return f"{self._above}.{name}" if self._above else name

    def get(self, name: str) -> Any:
        """The value of any type; None where there is none."""
        return self._values.get(name)

    def required(self, name: str) -> Any:
        """The value of any type. Raises Refusal where there is none."""
        value = self.get(name)
        if value is None:
            raise wrong(self.path(name), "is missing")
        return value

    def text(self, name: str, default: str | None = None, *, most: int | None = None) -> str:
        """A text of at most `most` characters; required without a default."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise wrong(self.path(name), f"must be a text, got {_kind(value)}")
        if most is not None and len(value) > most:
            raise wrong(self.path(name), f"has {len(value):,} characters, and may have {most:,}")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong(self.path(name), f"must be true or false, got {_kind(value)}")
        return value

    def integer(self, name: str, *, least: int = -_MAX_SEED, most: int = _MAX_SEED) -> int | None:
        """A whole number in these bounds, or None."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise wrong(self.path(name), f"must be a whole number, got {_kind(value)}")
        if not least <= value <= most:
            bound = f"at least {least}" if value < least else f"at most {most}"
            raise wrong(self.path(name), f"must be {bound}, got {value}")
        return value

    def number(
        self, name: str, *, least: float = -math.inf, most: float = math.inf
    ) -> float | None:
        """A finite number in these bounds, or None."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise wrong(self.path(name), f"must be a number, got {_kind(value)}")
        if not (math.isfinite(value) and least <= value <= most):
            raise wrong(self.path(name), f"must be from {least:g} to {most:g}, got {value}")
        return float(value)

    def choice(self, name: str, allowed: Collection[str], default: str) -> str:
        """One of the allowed texts."""
        value = self.get(name)
        if value is None:
            return default
        if value not in allowed:
            raise wrong(self.path(name), f"must be one of {', '.join(allowed)}, got {value!r:.100}")
        return value

    def array(self, name: str) -> list[Any]:
        """A list; empty where there is none."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise wrong(self.path(name), f"must be a list, got {_kind(value)}")
        return value

    def objects(self, name: str) -> list[Fields]:
        """The objects of a list; empty where there is none."""
        return [
            _object(entry, f"{self.path(name)}[{place}]")
            for place, entry in enumerate(self.array(name))
        ]

    def mapping(self, name: str) -> dict[str, Any]:
        """An object; empty where there is none."""
        value = self.get(name)
        if value is None:
            return {}
        return dict(_object(value, self.path(name))._values)

    def part(self, name: str) -> Fields:
        """An object as fields; without fields where there is none."""
        return Fields(self.mapping(name), self.path(name))

    def texts(self, name: str) -> tuple[str, ...]:
        """One text or several; empty where there is none."""
        value = self.get(name)
        entries = [value] if isinstance(value, str) else self.array(name)
        if not all(isinstance(entry, str) and entry for entry in entries):
            raise wrong(self.path(name), "must be a text or a list of texts that are not empty")
        if len(entries) > _MOST_TEXTS or any(len(entry) > _LONGEST_TEXT for entry in entries):
            limit = f"at most {_MOST_TEXTS} texts of at most {_LONGEST_TEXT} characters"
            raise wrong(self.path(name), f"takes {limit}")
        return tuple(entries)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Token ids; empty where there are none."""
        ids = self.array(name)
        if not all(type(token) is int and 0 <= token < _MAX_ID for token in ids):
            raise wrong(self.path(name), "must be a list of token ids, whole numbers from 0")
        return tuple(ids)

    def refuse(self, harmless: Mapping[str, Collection[Any]], why: str) -> None:
        """Raise Refusal for the first field whose value is not one of its harmless ones. Absent
        fields and false, zero and empty values are harmless."""
        for name, values in harmless.items():
            value = self.get(name)
            if value and value not in values:
                raise wrong(self.path(name), f"is {value!r:.100}, and {why}")


def read_json(body: bytes) -> Fields:
    """The fields of a body. Raises Refusal where it is no JSON object."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refusal(400, f"the body is no JSON: {error}") from error
    # A body with few brackets, as one of token ids, is not looked through.
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and is_deep(value):
        raise Refusal(400, f"the body has values that are nested more than {MAX_DEPTH} times")
    return _object(value, "")


def wrong(field: str, text: str) -> Refusal:
    """The refusal of a field."""
    return Refusal(400, f"{field or 'the body'} {text}", field=field or None)


def _object(value: Any, path: str) -> Fields:
    if not isinstance(value, dict):
        raise wrong(path, f"must be an object, got {_kind(value)}")
    return Fields(value, path)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean"}
    return "nothing" if value is None else names.get(type(value), f"{value}")
