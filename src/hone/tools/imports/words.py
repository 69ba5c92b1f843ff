"""Splits a shell script into words: quotes, and variables in words."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from hone.tools.imports.conditions import Truth
from hone.tools.imports.source import Word, place
from hone.tools.imports.sums import worked_out

__all__ = ["NAME", "WordReader", "closing", "text_in"]

NAME = re.compile(r"[A-Za-z_]\w*")
_EXPANSION = re.compile(r"([A-Za-z_]\w*|[@*#?$!0-9])(\[[@*0]\])?(?:(:?[-=+])(.*))?\Z", re.S)
_BARE = re.compile(r"[^\\'\"$` \t\n;&|()<>]+")
"""Characters that are literal outside quotes."""
_BETWEEN = re.compile(r'[^"\\$`]+')
"""Characters that are literal between double quotes."""


class WordReader(ABC):
    """Reader of a shell script, word by word; `at` is the next character."""

    def __init__(self, text: str, environment: Mapping[str, str], *, line: int, file: str) -> None:
        self.text = text.replace("\r\n", "\n")
        self.at = 0
        self.first_line = line
        self.file = file  # as words have it
        self.environment = environment
        self.arrays: dict[str, list[Word]] = {}
        self.notes: list[str] = []  # what could not be followed

    @property
    @abstractmethod
    def runs(self) -> Truth:
        """Whether the current command runs."""

    @abstractmethod
    def _inner(self, text: str, line: int) -> str:
        """Text within an expansion, with its variables filled in."""

    @abstractmethod
    def _printed(self, command: str, line: int) -> str | None:
        """The output of a command. None if only a run could tell."""

    @property
    def line(self) -> int:
        return self.first_line + self.text.count("\n", 0, self.at)

    def _here(self, text: str, line: int) -> Word:
        """A word of this file."""
        return Word(text, line, self.file)

    def _note(self, line: int, text: str) -> None:
        self.notes.append(f"{place(line, self.file)}: {text}")

    def _skip_blank(self) -> bool:
        """Skip blanks, continued lines and comments. Returns whether there were any."""
        found = re.compile(r"(?:[ \t]|\\\n)+|(?<![^\s;&|()])#[^\n]*").match(self.text, self.at)
        if found is not None:
            self.at = found.end()
        return found is not None

    def _word(self, *, split: bool = True) -> list[Word]:
        """Read a word. Its unquoted variables may split it into several."""
        words = [self._here("", self.line)]
        is_word = False

        def add(more: list[Word]) -> None:
            for number, word in enumerate(more):
                if number:
                    words.append(word)
                elif words[-1].text:
                    words[-1] = words[-1]._replace(text=words[-1].text + word.text)
                else:
                    words[-1] = word

        while self.at < len(self.text):
            char = self.text[self.at]
            line = self.line
            if char == "\\":
                if self.text[self.at : self.at + 2] == "\\\n":
                    break
                add([self._here(self.text[self.at + 1 : self.at + 2], line)])
                self.at += 2
            elif char == "'":
                add([self._here(self._literal(), line)])
                is_word = True
            elif char == '"':
                is_word |= self._quoted(add)
            elif char in "$`":
                made = self._expansion()
                add(_pieces(made) if split else made)
            elif found := _BARE.match(self.text, self.at):
                add([self._here(found[0], line)])
                self.at = found.end()
            else:
                break
        return [word for word in words if word.text or is_word or not split]

    def _literal(self) -> str:
        end = self.text.find("'", self.at + 1)
        start, self.at = self.at + 1, (len(self.text) if end < 0 else end) + 1
        return self.text[start : self.at - 1]

    def _quoted(self, add: Callable[[list[Word]], None]) -> bool:
        """Add the text between quotes. False for an array without elements, which makes no word."""
        self.at += 1
        start, is_empty = self.at, False
        while self.at < len(self.text) and self.text[self.at] != '"':
            char = self.text[self.at]
            if char == "\\" and self.text[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`", "\n"):
                escaped = self.text[self.at + 1]
                add([self._here("" if escaped == "\n" else escaped, self.line)])
                self.at += 2
            elif char in "$`":
                words = self._expansion(quoted=True)
                is_empty = not words
                add(words)
            else:
                found = _BETWEEN.match(self.text, self.at)
                text = found[0] if found else char
                add([self._here(text, self.line)])
                self.at += len(text)
        self.at += 1
        return not is_empty or self.text[start : self.at].count("$") != 1

    def _expansion(self, *, quoted: bool = False) -> list[Word]:
        """Read the expansion after a `$` or a backquote."""
        start, line = self.at, self.line
        if self.text.startswith("$((", start):
            self.at = closing(self.text, start + 1)
            inner = self._inner(self.text[start + 3 : self.at - 2], line)
            return [self._here(self._sum(inner, self.text[start : self.at]), line)]
        if self.text.startswith("$(", start) or self.text[start] == "`":
            is_old = self.text[start] == "`"
            end = self.text.find("`", start + 1) + 1 if is_old else closing(self.text, start + 1)
            self.at = end or len(self.text)
            written = self.text[start : self.at]
            command = written[1 if is_old else 2 : -1].strip()
            return [self._here(self._printed(command, line) or written, line)]
        if self.text.startswith("${", start):
            self.at = closing(self.text, start + 1)
            content = self.text[start + 2 : self.at - 1]
        else:
            found = NAME.match(self.text, start + 1)
            self.at = found.end() if found else min(start + 2, len(self.text))
            content = self.text[start + 1 : self.at]
        found = _EXPANSION.match(content)
        if found is None:
            return [self._here(self.text[start : self.at], line)]
        name, part, rule, other = found.groups()
        is_all = part in ("[@]", "[*]") or name in "@*"
        values = self._value(name, line)
        if part == "[0]" and values:
            values = values[:1]
        is_set = bool(values) and (
            not (rule or "").startswith(":") or any(map(text_in, values or ()))
        )
        if rule and ("+" in rule) == is_set:
            text = self._inner(other, line)
            if "=" in rule and self.runs is not False:
                self.arrays[name] = [self._here(text, line)]
            return [self._here(text, line)]
        if values is not None or rule:
            values = values or []
            joined = [self._here(" ".join(map(text_in, values)), line)]
            return values if (is_all and quoted) or (len(values) > 1 and not quoted) else joined
        if name in "@*":
            return []  # arguments of the script: none
        if is_all:
            if self.runs is not False:
                self._note(line, f"{name} is set nowhere in the script, and left out")
            return []
        return [self._here(self.text[start : self.at], line)]

    def _value(self, name: str, line: int) -> list[Word] | None:
        """Value of a variable. None if it is not set."""
        values = self.arrays.get(name)
        if name == "BASH_SOURCE":
            return [self._here(self.file, line)] if self.file else self.arrays.get("0")
        if values is None and name in self.environment:
            values = [self._here(self.environment[name], line)]
        if values is None and name == "#":
            values = [self._here("0", line)]
        return values

    def _sum(self, text: str, written: str) -> str:
        """Result of integer arithmetic, or the written text for anything else."""

        def value_of(name: str) -> str | None:
            values = self._value(name, 0)
            return values[0].text if values else None

        made = worked_out(text, value_of)
        return written if made is None else str(made)


def text_in(word: Word) -> str:
    """The text of a word, without its location."""
    return word.text


def _pieces(words: list[Word]) -> list[Word]:
    """Words of an unquoted variable. A value that could not be read stays whole."""
    return [
        word._replace(text=piece)
        for word in words
        for piece in ([word.text] if "$" in word.text else word.text.split())
    ]


def closing(text: str, start: int) -> int:
    """Position after the bracket that closes the one at `start`."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] in "({") - (text[at] in ")}")
        if depth == 0:
            return at + 1
    return len(text)
