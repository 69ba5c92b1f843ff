"""What a reader finds in a turn, and the pieces that readers share.

Readers stop after `MAX_ERRORS` malformed calls. Each may have cost a pass over the rest of the
text, so without a bound a text of nothing but opening marks would take quadratic time.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from hone.envs.session import ToolCall

__all__ = [
    "MAX_ERRORS",
    "Found",
    "Malformed",
    "Schemas",
    "TooManyErrors",
    "closed",
    "decode_json",
    "decode_whole",
    "read_each",
    "skip_space",
]

MAX_ERRORS = 16
_SHOWN_ERRORS = 3
_MAX_DEPTH = 100
_SPACE = re.compile(r"\s*")
_ESCAPED = re.compile(r"\\u[dD]")

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's arguments, by the name of the tool."""


class Malformed(ValueError):
    """Something that looks like a call of a tool is none. The text says why, for the policy."""


class TooManyErrors(Exception):
    """A turn has so many malformed calls that the rest of it is not read."""


@dataclass(slots=True)
class Found:
    """What has been found in a turn so far."""

    texts: list[str] = field(default_factory=list[str])
    """Pieces of the turn that belong to no call."""
    reasoning: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    errors: list[str] = field(default_factory=list[str])

    def error(self, error: Malformed | str) -> None:
        """Note a malformed call. Raises TooManyErrors for the last one that is read."""
        self.errors.append(str(error))
        if len(self.errors) >= MAX_ERRORS:
            raise TooManyErrors

    def call(self, name: Any, arguments: Any, call_id: Any = "") -> None:
        """Note a call. Raises Malformed where the name is no text or the arguments are no
        object."""
        if not isinstance(name, str) or not name.strip():
            raise Malformed(f"the name of a call is {_shown(name)}; write the name of a tool")
        if isinstance(arguments, str):
            arguments = decode_whole(arguments)
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise Malformed(
                f"the arguments of '{name.strip()}' are {_shown(arguments)}; write an object with "
                "a value for each argument"
            )
        self.calls.append(
            ToolCall(
                name=name.strip(),
                arguments=arguments,
                id=call_id if isinstance(call_id, str) else "",
            )
        )

    def json_calls(self, value: Any) -> None:
        """Note the calls of decoded JSON: an object with `name` and `arguments` (or `parameters`),
        or a list of them. A malformed entry of a list is noted as an error, and the others are
        calls. Raises Malformed for an object."""
        if not isinstance(value, list):
            self._json_call(value)
        elif not value:
            raise Malformed("the list of calls is empty")
        else:
            for entry in value:
                try:
                    self._json_call(entry)
                except Malformed as error:
                    self.error(error)

    def _json_call(self, value: Any) -> None:
        if not isinstance(value, dict) or "name" not in value:
            raise Malformed(
                f"{_shown(value)} is no call; write an object with `name` and `arguments`"
            )
        arguments = value.get("arguments", value.get("parameters"))
        self.call(value["name"], arguments, value.get("id", ""))

    @property
    def parse_error(self) -> str:
        """The first errors as one text; empty where there are none."""
        shown = self.errors[:_SHOWN_ERRORS]
        if (more := len(self.errors) - len(shown)) > 0:
            shown.append(f"and {more} more like these")
        return "; ".join(shown)


def read_each(
    text: str,
    found: Found,
    opening: re.Pattern[str],
    read: Callable[[re.Match[str]], int],
    closing: str | None = None,
) -> None:
    """Call `read` with each match of `opening`; it notes a call and returns where it ends. Where it
    raises Malformed, reading goes on after the next `closing` or at the next `opening`."""
    resume = re.compile(f"{re.escape(closing)}|{opening.pattern}") if closing else opening
    position = 0
    while match := opening.search(text, position):
        found.texts.append(text[position : match.start()])
        try:
            position = read(match)
        except Malformed as error:
            found.error(error)
            after = resume.search(text, match.end())
            if after is None:
                return
            position = after.end() if after[0] == closing else after.start()
    found.texts.append(text[position:])


def skip_space(text: str, position: int) -> int:
    """The place of the first character from `position` on that is no whitespace."""
    match = _SPACE.match(text, position)
    assert match is not None
    return match.end()


def closed(text: str, position: int, closing: str, *, is_whole: bool = True) -> int:
    """The place after `closing`, which must follow at `position` or after whitespace. Where the
    call is whole without it, it may be missing at the end of the turn. Raises Malformed."""
    position = skip_space(text, position)
    if text.startswith(closing, position):
        return position + len(closing)
    if position == len(text):
        if is_whole:
            return position
        raise Malformed(f"the turn ends before the call is complete: it has no `{closing}`")
    raise Malformed(f"`{closing}` does not follow the call")


def decode_json(text: str, position: int) -> tuple[Any, int]:
    """The JSON value at `position` or after whitespace, and the place after it. Raises
    Malformed."""
    start = skip_space(text, position)
    if start == len(text):
        raise Malformed("the turn ends before the call is complete")
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise Malformed(
            f"the call is no valid JSON: {error.msg} at {_shown_text(text[error.pos :][:20])}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the call is no valid JSON: {str(error).partition(';')[0]}") from None
    if text.count("[", start, end) + text.count("{", start, end) > _MAX_DEPTH:
        _require_shallow(value)
    if _ESCAPED.search(text, start, end):
        _require_unicode(value)
    return value, end


def decode_whole(text: str) -> Any:
    """The JSON value that a text is. Raises Malformed."""
    value, end = decode_json(text, 0)
    if (end := skip_space(text, end)) < len(text):
        raise Malformed(f"after the JSON follows {_shown_text(text[end : end + 20])}")
    return value


def _require_shallow(value: Any) -> None:
    """Raise Malformed for a value so deep that code which visits it could run out of stack."""
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    if level:
        raise Malformed(f"the call has more than {_MAX_DEPTH} levels")


def _require_unicode(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Malformed("the call is no valid JSON: half of a surrogate pair") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is too large")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


def _shown(value: Any) -> str:
    """A value as JSON, shortened."""
    if isinstance(value, Sequence) and len(value) > 100:
        value = value[:100]
    return _shown_text(json.dumps(value, ensure_ascii=False))


def _shown_text(text: str) -> str:
    return f"`{text}`" if len(text) <= 60 else f"`{text[:60]}...`"
