"""Readers of the format of Gemma 4 and FunctionGemma: a name, and arguments that look like JSON
without quotes.

    <|tool_call>call:weather{city:<|"|>Berlin<|"|>,days:3}<tool_call|>

A text stands between two equal marks and has no escapes, so it cannot have the mark in it. Keys
stand without quotes up to their colon.
"""

from __future__ import annotations

import re
from typing import Any

from hone.envs.tools.formats.found import (
    Found,
    Malformed,
    Schemas,
    closed,
    decode_json,
    read_each,
)
from hone.envs.tools.formats.scanner import NUMBER, Scanner, number

__all__ = ["functiongemma", "gemma4"]

_GEMMA4 = re.compile(r"<\|tool_call>")
_FUNCTIONGEMMA = re.compile("<start_function_call>")
_HEAD = re.compile(r"\s*call:\s*([^\s{}:,<>]+)\s*(?=\{)")
_KEY = re.compile(r"[^:{}\[\],]*")
_WORD = re.compile(r"[-+.\w]+")
_CONSTANTS = {"true": True, "false": False, "null": None, "True": True, "False": False,
              "None": None}  # fmt: skip


def gemma4(text: str, schemas: Schemas, found: Found) -> None:
    """`<|tool_call>call:NAME{key:<|"|>text<|"|>}<tool_call|>`: Gemma 4."""
    _read(text, found, _GEMMA4, '<|"|>', "<tool_call|>")


def functiongemma(text: str, schemas: Schemas, found: Found) -> None:
    """`<start_function_call>call:NAME{key:<escape>text<escape>}<end_function_call>`."""
    _read(text, found, _FUNCTIONGEMMA, "<escape>", "<end_function_call>")


def _read(text: str, found: Found, opening: re.Pattern[str], quote: str, closing: str) -> None:
    def read(match: re.Match[str]) -> int:
        if (head := _HEAD.match(text, match.end())) is None:
            raise Malformed(f"`{match[0]}` is followed by no `call:NAME{{`")
        scanner = _Scanner(text, head.end(), quote)
        arguments = scanner.value(0)
        end = closed(text, scanner.position, closing)
        found.call(head[1], arguments)
        return end

    read_each(text, found, opening, read, closing=closing)


class _Scanner(Scanner):
    """Reads a value."""

    def __init__(self, text: str, position: int, quote: str) -> None:
        super().__init__(text, position)
        self._quote = quote

    def value(self, depth: int) -> Any:
        self.require_shallow(depth)
        first = self.peek()
        if first == "{":
            return self._object(depth)
        if first == "[":
            return self._list(depth)
        if self.text.startswith(self._quote, self.position):
            return self._string()
        if first == '"':  # some turns have texts of JSON
            value, self.position = decode_json(self.text, self.position)
            return value
        return self._constant()

    def _object(self, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        self.position += 1
        while self.peek() != "}":
            key = self._key()
            self.take(":")
            values[key] = self.value(depth + 1)
            self.separated("}")
        self.position += 1
        return values

    def _list(self, depth: int) -> list[Any]:
        values: list[Any] = []
        self.position += 1
        while self.peek() != "]":
            values.append(self.value(depth + 1))
            self.separated("]")
        self.position += 1
        return values

    def _key(self) -> str:
        if self.text.startswith(self._quote, self.position):
            return self._string()
        if self.peek() == '"':
            value, self.position = decode_json(self.text, self.position)
            return str(value)
        match = _KEY.match(self.text, self.position)
        assert match is not None
        self.position = match.end()
        return match[0].strip()

    def _string(self) -> str:
        start = self.position + len(self._quote)
        if (end := self.text.find(self._quote, start)) < 0:
            raise Malformed(f"a text has no second `{self._quote}`")
        self.position = end + len(self._quote)
        return self.text[start:end]

    def _constant(self) -> Any:
        match = _WORD.match(self.text, self.position)
        word = match[0] if match else ""
        if word in _CONSTANTS:
            value = _CONSTANTS[word]
        elif NUMBER.fullmatch(word):
            value = number(word)
        elif not self.peek():
            raise Malformed("the turn ends before the call is complete")
        else:
            shown = self.text[self.position :][:20]
            raise Malformed(f"`{shown}` is no value; write texts between two `{self._quote}`")
        self.position += len(word)
        return value
