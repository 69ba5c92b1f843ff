"""Readers of formats in which calls are written as in Python, with constants as arguments.

Python's own parser is not used: some texts take it exponential time or the whole stack.
"""

from __future__ import annotations

import re
from typing import Any

from hone.envs.tools.formats.found import Found, Malformed, Schemas, closed, read_each
from hone.envs.tools.formats.scanner import NUMBER, Scanner, number

__all__ = ["lfm2", "olmo3", "pythonic"]

_OLMO = re.compile("<function_calls>")
_LFM = re.compile(r"<\|tool_call_start\|>")
_CALLS = re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\(")
_PYTHON_START = "<|python_start|>"

_NAME = re.compile(r"[^\W\d][\w.-]*")
_STRING = re.compile(
    r"'''((?:[^\\']|\\.|'(?!''))*+)'''|\"\"\"((?:[^\\\"]|\\.|\"(?!\"\"))*+)\"\"\""
    r"|'((?:[^\\']|\\.)*+)'|\"((?:[^\\\"]|\\.)*+)\"",
    re.DOTALL,
)
_ESCAPE = re.compile(
    r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|\n|[\\'\"abfnrtv0])", re.DOTALL
)
_ESCAPES = {"\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n",
            "r": "\r", "t": "\t", "v": "\v", "0": "\0"}  # fmt: skip
_CONSTANTS = {"True": True, "true": True, "False": False, "false": False, "None": None,
              "null": None}  # fmt: skip
_CLOSERS = {"[": "]", "(": ")", "{": "}"}


def olmo3(text: str, schemas: Schemas, found: Found) -> None:
    """`<function_calls>`, a line such as `weather(city='Berlin')` for each call, and
    `</function_calls>`: OLMo 3."""

    def read(match: re.Match[str]) -> int:
        scanner = _Scanner(text, match.end())
        calls: list[tuple[str, dict[str, Any]]] = []
        while scanner.peek() not in ("", "<"):
            calls.append(scanner.call())
        return _noted(found, calls, closed(text, scanner.position, "</function_calls>"))

    read_each(text, found, _OLMO, read, closing="</function_calls>")


def lfm2(text: str, schemas: Schemas, found: Found) -> None:
    """`<|tool_call_start|>[weather(city="Berlin"), time()]<|tool_call_end|>`: LFM 2."""

    def read(match: re.Match[str]) -> int:
        scanner = _Scanner(text, match.end())
        calls = scanner.calls()
        return _noted(found, calls, closed(text, scanner.position, "<|tool_call_end|>"))

    read_each(text, found, _LFM, read, closing="<|tool_call_end|>")


def pythonic(text: str, schemas: Schemas, found: Found) -> None:
    """`[weather(city="Berlin"), time()]` as the whole turn, or between `<|python_start|>` and
    `<|python_end|>`: Llama 4, ToolACE."""
    before, tag, _ = text.partition(_PYTHON_START)
    if not tag and not _CALLS.match(text):
        found.texts.append(text)
        return
    scanner = _Scanner(text, len(before) + len(tag) if tag else 0)
    found.texts.append(before if tag else "")
    try:
        calls = scanner.calls()
        end = _noted(found, calls, scanner.position)
    except Malformed as error:
        found.error(error)
        return
    found.texts.append(text[end:].removeprefix("<|python_end|>"))


def _noted(found: Found, calls: list[tuple[str, dict[str, Any]]], end: int) -> int:
    if not calls:
        raise Malformed("no call stands between the marks of calls")
    for name, arguments in calls:
        found.call(name, arguments)
    return end


class _Scanner(Scanner):
    """Reads calls with constants as arguments. Its methods raise Malformed."""

    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        """A list of calls in brackets."""
        self.take("[")
        calls: list[tuple[str, dict[str, Any]]] = []
        while self.peek() != "]":
            calls.append(self.call())
            self.separated("]")
        self.take("]")
        return calls

    def call(self) -> tuple[str, dict[str, Any]]:
        """A call: its name and arguments."""
        name = self._name("a name of a tool")
        self.take("(")
        arguments: dict[str, Any] = {}
        while self.peek() != ")":
            key = self._name(f"a name of an argument of '{name}' and `=`")
            self.take("=")
            arguments[key] = self._value(0)
            self.separated(")")
        self.take(")")
        return name, arguments

    def _value(self, depth: int) -> Any:
        first = self.peek()
        self.require_shallow(depth)
        if first in ("'", '"'):
            return self._string()
        if first == "{":
            return self._object(depth)
        if first in ("[", "("):
            self.take(first)
            values: list[Any] = []
            while self.peek() != _CLOSERS[first]:
                values.append(self._value(depth + 1))
                self.separated(_CLOSERS[first])
            self.take(_CLOSERS[first])
            return values
        if match := NUMBER.match(self.text, self.position):
            self.position = match.end()
            return number(match[0])
        name = self._name("a constant")
        if name not in _CONSTANTS:
            raise Malformed(f"`{name[:60]}` is no constant; write texts in quotes")
        return _CONSTANTS[name]

    def _object(self, depth: int) -> dict[str, Any]:
        self.take("{")
        values: dict[str, Any] = {}
        while self.peek() != "}":
            if self.peek() not in ("'", '"'):
                raise self.expected("a key in quotes")
            key = self._string()
            self.take(":")
            values[key] = self._value(depth + 1)
            self.separated("}")
        self.take("}")
        return values

    def _string(self) -> str:
        if (match := _STRING.match(self.text, self.position)) is None:
            raise Malformed("a text in quotes has no end")
        self.position = match.end()
        return _unescaped(next(group for group in match.groups() if group is not None))

    def _name(self, what: str) -> str:
        self.peek()
        if (match := _NAME.match(self.text, self.position)) is None:
            raise self.expected(what)
        self.position = match.end()
        return match[0]


def _unescaped(text: str) -> str:
    def value(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] not in "xuU":
            return _ESCAPES[code]
        number = int(code[1:], 16)
        if number > 0x10FFFF or 0xD800 <= number < 0xE000:
            raise Malformed(f"`\\{code}` is no character")
        return chr(number)

    return _ESCAPE.sub(value, text)
