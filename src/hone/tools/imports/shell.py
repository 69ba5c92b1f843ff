"""Reads the commands of a shell script, as far as they are known without running it.

Variables (with defaults), arrays, integer arithmetic, here-documents, quotes, continued lines,
functions, scripts within a word (`bash -c`) and files (`source FILE`) are followed. Of branches,
the one that the shell would take is read. If only a run could tell, the first one is read, with a
note; a loop is read once. Parts of a value that only a run could tell (`$(date)`, unset variables)
stay in a word as written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hone.tools.imports.conditions import Truth, both, either, holds, is_known, matches, opposite
from hone.tools.imports.source import Word, place
from hone.tools.imports.sourced import NotRead, read_sourced
from hone.tools.imports.words import NAME, WordReader, closing, text_in

__all__ = ["Script", "read_script"]

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_UNSET = re.compile(r"\$(?:([A-Za-z_]\w*|[1-9])|\{([A-Za-z_]\w*|[1-9])\})")
_PLAIN = {"time", "exec", "command", "builtin", "nohup"}
"""Words before a command that do not change what it runs."""
_ASKING = ("if", "while", "until")
_QUIET = {"true", ":", "false", "set", "shift", "mkdir"}
"""Commands that print nothing, and change no variable."""
_DECLARES = {"export", "declare", "local", "readonly", "typeset"}
_SHELL = re.compile(r"(?:.*/)?(?:bash|sh|zsh)")
_SCRIPT_FLAG = re.compile(r"-[a-z]*c")
_MAX_DEPTH = 8
"""Most levels of functions, scripts and files within each other."""
_MAX_FILES = 100
"""Most files that are read into a script, since files may source each other."""


@dataclass(slots=True)
class Script:
    """A script that was read."""

    commands: list[list[Word]] = field(default_factory=list[list[Word]])
    """Commands as words, with variables filled in."""
    unsure: dict[int, str] = field(default_factory=dict[int, str])
    """Why it is unknown whether a command runs, or how often, by its position."""
    variables: dict[str, list[Word]] = field(default_factory=dict[str, list[Word]])
    """Variables at the end of the script."""
    notes: list[str] = field(default_factory=list[str])
    """Notes on parts that could not be followed."""


def read_script(text: str, environment: Mapping[str, str], path: Path) -> Script:
    """Read a script. Variables that it does not set come from `environment`, its own location from
    `path`."""
    reader = _Reader(text, environment)
    reader.arrays["0"] = [Word(str(path), 0)]
    reader.within = (str(path),)
    return reader.read()


class _Function(NamedTuple):
    text: str
    line: int
    """Number of its first line."""
    file: str
    """Name of its file, as in `Word.file`."""


@dataclass(slots=True, kw_only=True)
class _Block:
    """A compound command that is open: `if`, `case`, `for`, `while`, `{`, `(` or a function."""

    kind: str
    line: int
    outer: Truth
    """Whether it runs at all."""
    gate: Truth
    """Result of the command list before it, on which it depends."""
    runs: Truth
    """Whether the current part runs."""
    start: int
    """Start of its condition, or of a function's body."""
    word: str = ""
    """The word of `case`, or the name of a function."""
    asks: bool = False
    """Whether a condition is being read."""
    is_settled: bool = False
    """Whether a branch was taken."""
    why: str = ""
    """What is unknown about the current part."""
    sets: list[str] = field(default_factory=list[str])
    """Variables that the current part changes."""
    sets_any: list[str] = field(default_factory=list[str])
    """Variables that parts name, whether they run or not."""
    unset: list[str] = field(default_factory=list[str])
    """Variables of its conditions that nothing sets."""
    folder: str = ""
    """Folder in which it began."""


class _Reader(WordReader):
    def __init__(
        self,
        text: str,
        environment: Mapping[str, str],
        *,
        line: int = 1,
        file: str = "",
        depth: int = 0,
    ) -> None:
        super().__init__(text, environment, line=line, file=file)
        self.depth = depth  # of functions, scripts and files within each other
        self.functions: dict[str, _Function] = {}
        self.folder = ""  # that `cd` went to, from the one of the import
        self.within: tuple[str, ...] = ()  # files that are being read, this one the last
        self.sourced: list[str] = []  # all files that were read so far
        self.blocks: list[_Block] = []
        self.status: Truth = True  # of the last command
        self.gate: Truth = True  # whether the list before lets the next command run
        self.is_opposite = False  # behind `!`
        self.is_piped = False
        self.unset: list[str] = []  # what tests of this command ask for, and nothing sets
        self.left = ""  # the place of an `exit` that runs
        self.documents: list[tuple[str, str]] = []  # here-documents whose text is still to come
        self.output: list[str] | None = []  # what it prints; None where only a run could tell
        self.script = Script(notes=self.notes)

    def read(self) -> Script:
        words: list[Word] = []
        while self.at < len(self.text):
            if self._skip_blank():
                continue
            char = self.text[self.at]
            if char in "\n;&|()" and not self.text.startswith("&>", self.at):
                words = self._operator(words)
            elif char in "<>&":
                self._redirect(words)
            elif (found := _ASSIGNMENT.match(self.text, self.at)) and _is_start(words):
                self._assign(found)
            elif not words and re.compile(r"\[\[\s").match(self.text, self.at):
                words = self._test()
            elif [word.text for word in words] == ["case"]:
                words += self._word(split=False)
            else:
                words = self._keyword(words, self._word())
        self._end(words)
        self.script.variables = self.arrays
        return self.script

    @property
    def runs(self) -> Truth:
        """Whether the current command runs."""
        return both(self.blocks[-1].runs if self.blocks else True, self.gate)

    def _operator(self, words: list[Word]) -> list[Word]:
        """Read an operator that ends a command or opens a group. Returns the words of the next
        command."""
        sign = next(
            sign for sign in ("&&", "||", ";;&", ";;", ";&", "((", *"\n;&|()")
            if self.text.startswith(sign, self.at)
        )  # fmt: skip
        names = [word.text for word in words]
        if sign == "((" and names in ([], ["for"]):
            start, line = self.at, self.line
            self.at = closing(self.text, start)
            inner = self.text[start + 2 : self.at - 2]
            return [*words, self._here("((", line), self._here(inner, line)]
        if sign in ("(", "(("):
            self.at += 1
            if found := re.compile(r"\s*\)\s*\{").match(self.text, self.at):
                self.at = found.end()
                self._open("function", word=names[-1] if names else "")
            else:
                self._end(words)
                self._open("(")
            return []
        self._end(words)
        self.at += len(sign)
        if sign in ("&&", "||"):
            self.gate = self.status if sign == "&&" else opposite(self.status)
        elif sign == "|":
            self.is_piped = True
        elif sign == ")":
            self._close("(")
        else:
            self.gate = True
            if not (self.blocks and self.blocks[-1].asks):
                self.unset.clear()
        if sign == "\n":
            self._take_documents()
        elif sign in (";;&", ";;", ";&"):
            self._pattern()
        return []

    # Branches, loops, functions

    def _keyword(self, words: list[Word], new: list[Word]) -> list[Word]:
        """The words of a command with new ones, without keywords that open, divide or close a
        block."""
        text = new[0].text if new and not words else ""
        if len(words) == 2 and words[0].text == "case" and new and new[0].text == "in":
            self._open("case", word=self._filled(words[1].text))
            self._pattern()
            return []
        if words and words[0].text == "function" and len(words) == 1:
            found = re.compile(r"(?:\s*\(\s*\))?\s*\{").match(self.text, self.at)
            self.at = found.end() if found else self.at
            self._open("function", word=new[0].text)
            return []
        match text:
            case "if" | "while" | "until" | "{":
                self._open(text)
            case "then" | "do":
                self._choose()
            case "elif" | "else":
                self._part(text)
            case "fi" | "done" | "esac" | "}":
                self._close(text)
            case "!":
                self.is_opposite = not self.is_opposite
            case "":
                return [*words, *new]
            case _:
                return [] if text in _PLAIN else new
        return []

    def _open(self, kind: str, *, word: str = "") -> None:
        runs = False if kind == "function" else self.runs
        self.blocks.append(
            _Block(kind=kind, line=self.line, outer=self.runs, gate=self.gate, runs=runs,
                   start=self.at, word=word, asks=kind in _ASKING, folder=self.folder)
        )  # fmt: skip
        self.gate = True

    def _choose(self) -> None:
        """After a condition: decide whether the following part is read."""
        if not self.blocks or self.blocks[-1].kind not in _ASKING:
            return
        block = self.blocks[-1]
        block.asks = False
        written = " ".join(self.text[block.start : self.at].split()[:-1]).rstrip("; ")
        truth = opposite(self.status) if block.kind == "until" else self.status
        block.unset += self.unset
        self.unset.clear()
        self._take(block, truth, f"whether `{_short(written)}` holds")
        if block.kind != "if" and block.runs:
            block.why = (
                f"how often the loop `{_short(written)}` runs is not known, and it is read once"
            )
        self.gate = True

    def _take(self, block: _Block, truth: Truth, question: str) -> None:
        """Read a branch if its condition holds, or the first one if only a run could tell."""
        block.runs = both(block.outer, truth) if not block.is_settled else False
        block.is_settled |= block.runs is not False
        block.why = (
            f"{question} is known only when the script runs, and this branch is read"
            if block.runs is None and truth is None
            else ""
        )

    def _part(self, text: str) -> None:
        """Handle `elif` and `else`."""
        block = self.blocks[-1] if self.blocks else None
        if block is None or block.kind != "if":
            return
        self._note_block(block)
        block.runs = False if block.is_settled else block.outer
        block.start = self.at
        block.line = self.line
        block.asks = text == "elif"
        block.is_settled |= text == "else"
        self.status = self.gate = True

    def _pattern(self) -> None:
        """Read the patterns of the next branch of a `case`."""
        block = self.blocks[-1] if self.blocks else None
        if block is None or block.kind != "case":
            return
        self._note_block(block)
        self.gate = True
        while self._skip_blank() or self.text.startswith(("\n", "("), self.at):
            self.at += self.text.startswith(("\n", "("), self.at)
        if re.compile(r"esac\b").match(self.text, self.at):
            return
        block.line = self.line
        truth: Truth = False
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at] in "|\n;&(<>":
                self.at += 1
            elif not self._skip_blank():
                pattern = "".join(map(text_in, self._word(split=False)))
                truth = either(truth, matches(block.word, self._filled(pattern)))
        self.at += 1
        block.unset += self.unset
        self.unset.clear()
        self._take(block, truth, f"what `case` has for `{_short(block.word)}`")

    def _close(self, text: str) -> None:
        kinds = {"fi": ("if",), "done": ("for", "while", "until"), "esac": ("case",),
                 "}": ("{", "function")}.get(text, (text,))  # fmt: skip
        if not self.blocks or self.blocks[-1].kind not in kinds:
            return
        block = self.blocks.pop()
        self._note_block(block)
        if block.unset and block.sets_any and block.outer is not False:
            self._note_unset(block.line, block.unset, block.sets_any)
        self.gate = block.gate
        if block.kind == "(":
            self.folder = block.folder
        if block.kind == "function" and block.outer is not False:
            body = self.text[block.start : self.at].rstrip().removesuffix("}")
            line = self.first_line + self.text.count("\n", 0, block.start)
            self.functions[block.word] = _Function(body, line, self.file)
            self.status = True
        elif block.kind not in ("{", "(", "function"):
            self.status = None

    def _note_block(self, block: _Block) -> None:
        """Add a note, at the end of a block's part, on what is unknown about it."""
        if block.why and block.sets:
            self._note(block.line, f"{block.why}; it sets {_names(block.sets)}")
        block.sets.clear()

    def _note_unset(self, line: int, unset: list[str], names: list[str]) -> None:
        self._note(
            line,
            f"{_names(unset)}, which nothing sets, counts as empty, and decides over "
            f"{_names(names)}",
        )

    def _why(self, where: str) -> str:
        """What is unknown about a command here, from the nearest block or the command list before
        it."""
        if (block := self._unsure()) is not None:
            return f"{place(block.line, self.file)}: {block.why}"
        return "" if self.runs else f"{where}: whether it runs is known only when the script runs"

    def _unsure(self) -> _Block | None:
        """The nearest block of which it is unknown whether, or how often, it runs."""
        return next((block for block in self.blocks[::-1] if block.why), None)

    # Commands

    def _end(self, words: list[Word]) -> None:
        if not words:
            return
        name = words[0].text
        if name == "for":
            self._for(words)
            return
        if self.runs is not False:
            status = self._run(name, words)
            status = opposite(status) if self.is_opposite else status
            self.status = None if self.is_piped or self.gate is None else status
        elif name in ("source", "."):
            self._changed([f"`{_written(words)}`"], "")
        self.is_opposite = self.is_piped = False

    def _run(self, name: str, words: list[Word]) -> Truth:
        """Apply the effects of a command on later ones. Returns whether it succeeds."""
        match name:
            case "[" | "[[" | "test":
                inner = words[1:-1] if name == "[" else words[1:]
                return holds([self._filled(word.text) for word in inner])
            case "((":
                made = self._sum(self._inner(words[1].text, words[1].line), "")
                return bool(int(made)) if made else None
            case "echo":
                return self._print(" ".join(map(text_in, words[1:])))
            case "exit" | "return":
                return self._leave(name, words[0].where)
            case "source" | ".":
                return self._source(words)
            case "cd" | "pwd" | "dirname" | "realpath" | "readlink":
                return self._place(name, words)
            case _ if name in _QUIET:
                return name != "false"
            case _ if name in _DECLARES:
                for word in words[1:]:
                    variable, equals, value = word.text.partition("=")
                    if equals:
                        self._set(variable, [word._replace(text=value)])
                return True
            case _:
                return self._start(name, words)

    def _print(self, text: str) -> Truth:
        is_known = self.runs and self.output is not None and not text.startswith("-")
        self.output = [*(self.output or ()), text] if is_known else None
        return True

    def _start(self, name: str, words: list[Word]) -> Truth:
        """Record a program that is started."""
        if any("torch_npu" in word.text or word.text == "npu-smi" for word in words):
            self.notes.append(
                f"{words[0].where}: `{_written(words)}` counts as failed: hone runs on no NPU"
            )
            return False
        self.output = None
        if self._within(name, words):
            return None
        if why := self._why(words[0].where):
            self.script.unsure[len(self.script.commands)] = why
        if self.left:
            self.notes.append(
                f"{self.left}: with what is known here the script ends there; the rest is "
                "read as if it went on"
            )
            self.left = ""
        self.script.commands.append(words)
        return None

    def _within(self, name: str, words: list[Word]) -> bool:
        """Read the function, or the script in a word, that a command runs."""
        if self.depth >= _MAX_DEPTH:
            return False
        if name in self.functions:
            inner = self._reader(*self.functions[name])
            self._merge(inner, words, arguments=words[1:])
            return True
        text = next(
            (word for shell, flag, word in zip(words, words[1:], words[2:], strict=False)
             if _SHELL.fullmatch(shell.text) and _SCRIPT_FLAG.fullmatch(flag.text)), None,
        )  # fmt: skip
        if name == "eval" and len(words) > 1:
            text = words[1]._replace(text=" ".join(map(text_in, words[1:])))
        if text is None:
            return False
        self._merge(self._reader(*text), words, is_own=name != "eval")
        return True

    def _source(self, words: list[Word]) -> Truth:
        """Read the file that `source` names as a part of this script. Returns whether its last
        command succeeds."""
        try:
            inner = self._of_file(words)
        except NotRead as error:
            self.notes.append(f"{words[0].where}: `{_written(words)}` is not read: {error}")
            return None
        self.sourced.append(inner.file)
        self._merge(inner, words, arguments=words[2:] or None)
        return inner.status

    def _of_file(self, words: list[Word]) -> _Reader:
        """A reader of the file that `source` names. Raises NotRead."""
        if len(words) == 1:
            raise NotRead("it names no file. Set the variables in the script itself.")
        if self.depth >= _MAX_DEPTH or len(self.sourced) >= _MAX_FILES:
            raise NotRead(
                f"at most {_MAX_FILES} files are read, {_MAX_DEPTH} within each other. Set the "
                "variables that the script needs in the script itself."
            )
        name = words[1].text.replace("$(pwd)", self.folder or ".")
        if name.startswith("~/") and "HOME" in self.environment:
            name = self.environment["HOME"] + name[1:]
        made = read_sourced(name, (self.folder, "", os.path.dirname(self.within[0])))
        if os.path.realpath(made.path) in map(os.path.realpath, self.within):
            raise NotRead("it is within that file itself. Nothing is to be done.")
        if made.is_guess:
            self.notes.append(
                f"{words[0].where}: `{_written(words)}` counts as '{made.path}', since that file "
                "is here; only a run of the script could tell"
            )
        inner = self._reader(made.text, 1, made.path)
        inner.within = (*self.within, made.path)
        return inner

    def _place(self, name: str, words: list[Word]) -> Truth:
        """Change to a folder, or print one, if it is known."""
        path = words[-1].text if len(words) > 1 else "$HOME"
        if name == "cd":
            path = "$OLDPWD" if path == "-" else path
            self.folder = os.path.normpath(os.path.join(self.folder, path))
            return True
        if name == "pwd" and self.folder:
            return self._print(self.folder)
        if name == "pwd" or not is_known(path) or (name == "readlink" and words[1].text != "-f"):
            return self._start(name, words)
        if name == "dirname":
            return self._print(os.path.dirname(path) or ".")
        return self._print(os.path.normpath(os.path.join(self.folder, path)))

    def _reader(self, text: str, line: int, file: str) -> _Reader:
        """A reader of a text within this one, with the same variables."""
        inner = _Reader(text, self.environment, line=line, file=file, depth=self.depth + 1)
        inner.arrays, inner.functions = self.arrays, self.functions
        inner.folder, inner.within, inner.sourced = self.folder, self.within, self.sourced
        return inner

    def _merge(
        self,
        inner: _Reader,
        words: list[Word],
        *,
        arguments: list[Word] | None = None,
        is_own: bool = False,
    ) -> None:
        """Read the text of `inner` as commands of this script; with `is_own` another shell runs
        them."""
        start, before = len(self.script.commands), dict(self.arrays)
        if arguments is not None:
            self.arrays |= {str(number): [word] for number, word in enumerate(arguments, 1)}
            count = words[0]._replace(text=str(len(arguments)))
            self.arrays |= {"@": arguments, "#": [count]}
        made = inner.read()
        for key in [key for key in self.arrays if not NAME.match(key)]:  # arguments
            if key in before:
                self.arrays[key] = before[key]
            else:
                del self.arrays[key]
        why = self._why(words[0].where)
        for number in range(len(made.commands)):
            if reason := made.unsure.get(number) or why:
                self.script.unsure[start + number] = reason
        self.script.commands += made.commands
        self.notes += inner.notes
        names = [
            name for name, values in self.arrays.items()
            if [*map(text_in, values)] != [*map(text_in, before.get(name, ()))]
        ]  # fmt: skip
        self._changed(
            names,
            f"{words[0].where}: whether `{_written(words)}` runs is known only when the script "
            f"runs; it is read, and sets {_names(names)}",
        )
        if not is_own:
            self.folder = inner.folder
            if inner.left:
                self._leave("exit", inner.left)

    def _leave(self, name: str, where: str) -> Truth:
        """Handle `exit` and `return`: a branch that only a run could choose and that ends the
        script is not the one that trains."""
        unsure = self._unsure()
        if unsure is not None and unsure.kind in ("if", "case"):
            unsure.is_settled = unsure.runs = False
        elif self.runs and name == "exit":
            self.left = where
        elif self.runs and self.depth:
            for block in self.blocks[::-1]:
                self._note_block(block)
            self.at = len(self.text)
        return None

    def _for(self, words: list[Word]) -> None:
        """Open a loop over the words after `in`; its first pass is read."""
        values = words[3:] if len(words) > 2 and words[2].text == "in" else []
        is_counted = len(words) > 1 and words[1].text == "(("
        self._open("for")
        block = self.blocks[-1]
        if is_counted:
            block.why = "how often this loop runs is not known, and it is read once"
        elif not values:
            block.runs = False
        elif block.runs is not False:
            if len(values) > 1:
                block.why = (f"of the loop over {words[1].text} the first pass alone is read, with "
                             f"{values[0].text}")  # fmt: skip
            self.arrays[words[1].text] = values[:1]

    def _test(self) -> list[Word]:
        """The words of `[[ ... ]]`, in which `&&`, `||`, brackets and `<` are words too."""
        words = [self._here("[[", self.line)]
        self.at += 2
        while self.at < len(self.text) and not self.text.startswith("]]", self.at):
            sign = re.compile(r"&&|\|\||[()<>]").match(self.text, self.at)
            if sign:
                words.append(self._here(sign[0], self.line))
                self.at = sign.end()
            elif self.text[self.at] == "\n":
                self.at += 1
            elif not self._skip_blank():
                start = self.at
                words += self._word(split=False)
                self.at = max(self.at, start + 1)
        self.at += 2
        return words

    def _filled(self, text: str) -> str:
        """A word of a test, with unset variables empty, as in the shell."""

        def empty(found: re.Match[str]) -> str:
            name = found[1] or found[2]
            if name not in self.unset:
                self.unset.append(name)
            return ""

        return _UNSET.sub(empty, text)

    def _redirect(self, words: list[Word]) -> None:
        """Skip redirections; keep a here-document for `read` or a command."""
        if words and words[-1].text.isdigit() and self.text[self.at - 1].isdigit():
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
                inner = self._reader(f"_=({body})", self.line, self.file)
                inner.arrays = dict(self.arrays)  # what else it holds is text, and sets nothing
                inner.read()
                self._set(name, inner.arrays.get("_", []))
            self.at = found.end() if found else len(self.text)
        self.documents.clear()

    def _assign(self, found: re.Match[str]) -> None:
        self.at = found.end()
        is_array = self.text[self.at : self.at + 1] == "("
        if is_array:
            self.at += 1
            values: list[Word] = []
            while self.at < len(self.text) and self.text[self.at] != ")":
                if self.text[self.at] == "\n":
                    self.at += 1
                elif not self._skip_blank():
                    start = self.at
                    values += self._word()
                    self.at = max(self.at, start + 1)  # a `;` or `|` that no shell takes here
            self.at += 1
        else:
            is_empty = self.at >= len(self.text) or self.text[self.at] in " \t\n;&|)"
            values = [self._here("", self.line)] if is_empty else self._word(split=False)
        if found[2]:
            values = _added(self.arrays.get(found[1], []), values, is_array=is_array)
        self._set(found[1], values)

    def _set(self, name: str, values: list[Word]) -> None:
        is_new = [*map(text_in, self.arrays.get(name, ()))] != [*map(text_in, values)]
        if self.runs is not False:
            self.status = None if self.gate is None else True
            self.arrays[name] = values
        where = values[0].where if values else place(self.line, self.file)
        self._changed(
            [name] if is_new else [],
            f"{where}: whether {name} is set to {' '.join(map(text_in, values))!r} is known only "
            "when the script runs; it is taken",
        )

    def _changed(self, names: list[str], note: str) -> None:
        """Record variables that the open blocks change. If no block is open, add `note`."""
        if not names:
            return
        for block in self.blocks:
            block.sets_any += [name for name in names if name not in block.sets_any]
        if self.unset:  # of a test before it: `[ -z "$X" ] && Y=1`
            self._note_unset(self.line, self.unset, names)
        if self.runs is False:
            return
        unsure = self._unsure()
        if unsure is not None:
            unsure.sets += [name for name in names if name not in unsure.sets]
        elif self.gate is None:
            self.notes.append(note)

    def _printed(self, command: str, line: int) -> str | None:
        """The output of a command that consists of tests and `echo`. None for any other."""
        if self.depth >= _MAX_DEPTH:
            return None
        inner = self._reader(command, line, self.file)
        inner.arrays = dict(self.arrays)
        inner.read()
        if not inner.output or not is_known("".join(inner.output)):
            return None
        if self.runs is not False:
            self.notes += inner.notes
        return "\n".join(inner.output)

    def _inner(self, text: str, line: int) -> str:
        """Text within an expansion, with its variables filled in."""
        inner = self._reader(f'"{text.strip(chr(34))}"', line, self.file)
        inner.blocks = self.blocks
        made = " ".join(word.text for word in inner._word(split=False))
        self.notes += inner.notes
        return made


def _written(words: list[Word]) -> str:
    """A command for a note."""
    return _short(" ".join(map(text_in, words)))


def _is_start(words: list[Word]) -> bool:
    """Whether a variable assignment may follow these words."""
    return not words or (
        words[0].text in _DECLARES and all(word.text.startswith("-") for word in words[1:])
    )


def _added(before: list[Word], values: list[Word], *, is_array: bool) -> list[Word]:
    """Result of `+=`: more elements of an array, or a longer text, whose added words keep their
    lines."""
    if is_array or not before or values[0].text[:1].isspace():
        return [*before, *(values if is_array else [_stripped(word) for word in values])]
    return [*before[:-1], before[-1]._replace(text=before[-1].text + values[0].text), *values[1:]]


def _stripped(word: Word) -> Word:
    return word._replace(text=word.text.strip())


def _names(names: list[str]) -> str:
    return ", ".join(names)


def _short(text: str) -> str:
    """A text for a note."""
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:56]} ..."
