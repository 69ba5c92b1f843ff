"""The commands of a shell script, as far as they can be known without running it.

Variables (with defaults), arrays, sums of whole numbers, here-documents, quotes and continued lines
are followed; of branches all are, one after another. What only a run could tell (`$(date)`, unset
variables) stays in a word as it is written.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hone.importing.source import Word

__all__ = ["Script", "read_script"]

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_EXPANSION = re.compile(r"([A-Za-z_]\w*|[@*#?$!0-9])(\[[@*]\])?(?:(:?[-=+])(.*))?\Z", re.S)
_KEYWORDS = {"if", "then", "else", "elif", "do", "while", "until", "!", "{", "time", "exec"}
_SUMS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(slots=True)
class Script:
    """A script that was read."""

    commands: list[list[Word]] = field(default_factory=list[list[Word]])
    """Each as its words, variables filled in."""
    variables: dict[str, list[Word]] = field(default_factory=dict[str, list[Word]])
    """What it sets, at its end."""
    notes: list[str] = field(default_factory=list[str])
    """What could not be followed."""


def read_script(text: str, environment: Mapping[str, str], path: Path) -> Script:
    """Read a script; variables that it does not set come from `environment`, what it makes of its
    own place from `path`."""
    reader = _Reader(text.replace("${BASH_SOURCE[0]}", "$0"), environment)
    reader.arrays["0"] = [Word(str(path), 0)]
    return reader.read()


class _Reader:
    def __init__(self, text: str, environment: Mapping[str, str]) -> None:
        self.text = text.replace("\r\n", "\n")
        self.at = 0
        self.environment = environment
        self.arrays: dict[str, list[Word]] = {}
        self.depth = 0  # of branches
        self.documents: list[tuple[str, str]] = []  # here-documents whose text is still to come
        self.script = Script()

    def read(self) -> Script:
        words: list[Word] = []
        while self.at < len(self.text):
            if self._skip_blank():
                continue
            char = self.text[self.at]
            if char in "\n;&|()":
                self.at += 1
                self._end(words)
                words = []
                if char == "\n":
                    self._take_documents()
            elif char in "<>":
                self._redirect(words)
            elif (found := _ASSIGNMENT.match(self.text, self.at)) and _is_start(words):
                self.depth += sum(word.text == "if" for word in words)
                words = []
                self._assign(found)
            else:
                words += self._word()
        self._end(words)
        self.script.variables = self.arrays
        return self.script

    @property
    def line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def _skip_blank(self) -> bool:
        """Skip blanks, continued lines and comments; whether there were any."""
        found = re.compile(r"(?:[ \t]|\\\n)+|(?<![^\s;&|()])#[^\n]*").match(self.text, self.at)
        if found is not None:
            self.at = found.end()
        return found is not None

    def _end(self, words: list[Word]) -> None:
        while words and words[0].text in _KEYWORDS:
            self.depth += words[0].text == "if"
            words = words[1:]
        if words and words[0].text in ("fi", "esac", "case"):
            self.depth += 1 if words[0].text == "case" else -1
        elif words and words[0].text in ("source", "."):
            written = " ".join(map(_text, words))
            self.script.notes.append(f"line {words[0].line}: what `{written}` sets is not read")
        elif words and words[0].text in ("export", "declare", "local", "readonly"):
            for word in words[1:]:
                name, equals, value = word.text.partition("=")
                if equals:
                    self._set(name, [word._replace(text=value)])
        elif words:
            self.script.commands.append(words)

    def _redirect(self, words: list[Word]) -> None:
        """Skip where output goes; keep a here-document for `read` or a command."""
        if words and words[-1].text.isdigit():
            words.pop()  # the 2 of 2>file
        found = re.compile(r"<<-?[ \t]*['\"]?(\w+)['\"]?").match(self.text, self.at)
        if found is not None:
            self.at = found.end()
            target = words[-1].text if words and words[0].text == "read" else ""
            self.documents.append((found[1], target))
            return
        self.at = re.compile(r"[<>&]+[ \t]*").match(self.text, self.at).end()  # pyright: ignore[reportOptionalMemberAccess]
        if self.at < len(self.text) and self.text[self.at] not in "\n;|()":
            self._word()

    def _take_documents(self) -> None:
        for end, name in self.documents:
            start = self.at
            found = re.compile(rf"^[ \t]*{end}[ \t]*$", re.M).search(self.text, start)
            body = self.text[start : found.start() if found else len(self.text)]
            if name:
                inner = _Reader(f"_=({body})", self.environment)
                inner.arrays = self.arrays
                inner.read()
                self._set(name, [
                    word._replace(text=word.text, line=word.line + self.line - 1)
                    for word in self.arrays.pop("_")
                ])  # fmt: skip
            self.at = found.end() if found else len(self.text)
        self.documents.clear()

    def _assign(self, found: re.Match[str]) -> None:
        self.at = found.end()
        if self.text[self.at : self.at + 1] == "(":
            self.at += 1
            values: list[Word] = []
            while self.at < len(self.text) and self.text[self.at] != ")":
                if self.text[self.at] == "\n":
                    self.at += 1
                elif not self._skip_blank():
                    values += self._word()
            self.at += 1
        else:
            is_empty = self.at >= len(self.text) or self.text[self.at] in " \t\n;&|)"
            values = [Word("", self.line)] if is_empty else self._word(split=False)
        if found[2]:
            values = [*self.arrays.get(found[1], []), *values]
        self._set(found[1], values)

    def _set(self, name: str, values: list[Word]) -> None:
        before = self.arrays.get(name)
        if self.depth > 0 and before and [*map(_text, before)] != [*map(_text, values)]:
            self.script.notes.append(
                f"line {values[0].line if values else self.line}: {name} depends on a branch; its "
                f"last value, {' '.join(map(_text, values))!r}, is taken"
            )
        self.arrays[name] = values

    def _word(self, *, split: bool = True) -> list[Word]:
        """The word here, as so many words as its unquoted variables make it."""
        line, parts = self.line, [""]
        lines = [line]
        is_word = False

        def add(words: list[Word]) -> None:
            for number, word in enumerate(words):
                if number:
                    parts.append("")
                    lines.append(word.line)
                elif not parts[-1]:
                    lines[-1] = word.line
                parts[-1] += word.text

        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\\":
                if self.text[self.at : self.at + 2] == "\\\n":
                    break
                parts[-1] += self.text[self.at + 1 : self.at + 2]
                self.at += 2
            elif char == "'":
                parts[-1] += self._literal()
                is_word = True
            elif char == '"':
                is_word |= self._quoted(add)
            elif char in "$`":
                words = self._expansion()
                add(_pieces(words) if split else words)
            elif char in " \t\n;&|()<>":
                break
            else:
                parts[-1] += char
                self.at += 1
        kept = zip(parts, lines, strict=True)
        return [Word(text, at) for text, at in kept if text or is_word or not split]

    def _literal(self) -> str:
        end = self.text.find("'", self.at + 1)
        start, self.at = self.at + 1, (len(self.text) if end < 0 else end) + 1
        return self.text[start : self.at - 1]

    def _quoted(self, add: Callable[[list[Word]], None]) -> bool:
        """Add what is between quotes; False where it was an array without elements, which makes no
        word."""
        self.at += 1
        start, is_empty = self.at, False
        while self.at < len(self.text) and self.text[self.at] != '"':
            char = self.text[self.at]
            if char == "\\" and self.text[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`", "\n"):
                escaped = self.text[self.at + 1]
                add([Word("" if escaped == "\n" else escaped, self.line)])
                self.at += 2
            elif char in "$`":
                words = self._expansion(quoted=True)
                is_empty = not words
                add(words)
            else:
                add([Word(char, self.line)])
                self.at += 1
        self.at += 1
        return not is_empty or self.text[start : self.at].count("$") != 1

    def _expansion(self, *, quoted: bool = False) -> list[Word]:
        """What a `$` or a backquote here stands for."""
        start, line = self.at, self.line
        if self.text.startswith("$((", start):
            self.at = _closing(self.text, start + 1)
            inner = self._inner(self.text[start + 3 : self.at - 2], line)
            return [Word(self._sum(inner, self.text[start : self.at]), line)]
        if self.text.startswith("$(", start) or self.text[start] == "`":
            is_old = self.text[start] == "`"
            end = self.text.find("`", start + 1) + 1 if is_old else _closing(self.text, start + 1)
            self.at = end or len(self.text)
            written = self.text[start : self.at]
            return [
                Word(self._place(written[1 if is_old else 2 : -1].strip(), line) or written, line)
            ]
        if self.text.startswith("${", start):
            self.at = _closing(self.text, start + 1)
            content = self.text[start + 2 : self.at - 1]
        else:
            found = _NAME.match(self.text, start + 1)
            self.at = found.end() if found else min(start + 2, len(self.text))
            content = self.text[start + 1 : self.at]
        found = _EXPANSION.match(content)
        if found is None:
            return [Word(self.text[start : self.at], line)]
        name, is_all, rule, other = found.groups()
        values = self.arrays.get(name)
        if values is None and name in self.environment:
            values = [Word(self.environment[name], line)]
        is_set = bool(values) and (
            not (rule or "").startswith(":") or any(map(_text, values or ()))
        )
        if rule and ("+" in rule) == is_set:
            text = self._inner(other, line)
            if "=" in rule:
                self.arrays[name] = [Word(text, line)]
            return [Word(text, line)]
        if values is not None or rule:
            values = values or []
            joined = [Word(" ".join(map(_text, values)), line)]
            return values if (is_all and quoted) or (len(values) > 1 and not quoted) else joined
        if name in "@*" or name.isdigit():
            return []  # arguments of the script: none
        if is_all:
            self.script.notes.append(
                f"line {line}: {name} is set nowhere in the script, and left out"
            )
            return []
        return [Word(self.text[start : self.at], line)]

    def _place(self, command: str, line: int) -> str | None:
        """What the usual commands say of a script's own folder; None for any other."""
        if found := re.fullmatch(r"dirname (?:-- )?(\S+)", command):
            return os.path.dirname(self._inner(found[1], line)) or "."
        if found := re.fullmatch(r"cd (?:-- )?(.+?)(?: *&?>[^&]*)? *&& *pwd(?: -P)?", command):
            return os.path.normpath(self._inner(found[1], line))
        return None

    def _sum(self, text: str, written: str) -> str:
        """A sum of whole numbers, worked out; as it is written where it is anything else."""

        def work_out(node: ast.expr) -> int:
            match node:
                case ast.Constant(value=int(value)):
                    return value
                case ast.Name(id=name) if name in self.arrays:
                    return int(self.arrays[name][0].text)
                case ast.BinOp(left=left, op=op, right=right) if type(op) in _SUMS:
                    return _SUMS[type(op)](work_out(left), work_out(right))
                case ast.UnaryOp(op=ast.USub(), operand=operand):
                    return -work_out(operand)
                case _:
                    raise ValueError

        try:
            return str(work_out(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, IndexError):
            return written

    def _inner(self, text: str, line: int) -> str:
        """Text within an expansion, its own variables filled in."""
        inner = _Reader(f'"{text.strip(chr(34))}"', self.environment)
        inner.arrays = self.arrays
        return " ".join(word.text for word in inner._word(split=False))


def _text(word: Word) -> str:
    return word.text


def _is_start(words: list[Word]) -> bool:
    """Whether a command begins behind these words."""
    return all(word.text in _KEYWORDS for word in words)


def _pieces(words: list[Word]) -> list[Word]:
    """What an unquoted variable splits into; what could not be read stays whole."""
    return [
        word._replace(text=piece)
        for word in words
        for piece in ([word.text] if "$" in word.text else word.text.split())
    ]


def _closing(text: str, start: int) -> int:
    """Behind the bracket that closes the one at `start`."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] in "({") - (text[at] in ")}")
        if depth == 0:
            return at + 1
    return len(text)
