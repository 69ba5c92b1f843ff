"""Settings of another framework's script or file, as given."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hone.config.recipe import parse_value

__all__ = ["Command", "Given", "Source", "Unread", "Word", "place", "text_of", "value_of"]

Command = Literal["rl", "sft", "dpo", "reward-model"]


class Word(NamedTuple):
    """A word of a command."""

    text: str
    line: int
    """Line where it was written; for elements of an array, where the array was filled."""
    file: str = ""
    """File of the line, if it is not the imported one."""

    @property
    def where(self) -> str:
        """Location, for comments."""
        return place(self.line, self.file) if self.line else "command"


class Given(NamedTuple):
    """A setting."""

    name: str
    """Dotted path, without leading dashes and with _ for -."""
    value: Any
    where: str
    """Location for comments, such as `line 12` or `env.sh, line 3`. Empty for a default of the
    framework."""


@dataclass(frozen=True, slots=True)
class Unread:
    """A value that is known only when the script runs."""

    text: str
    is_expression: bool = False
    """Whether it is an expression of a program, not a text to complete, such as `$ROOT/model`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """All that a script sets for one run."""

    framework: str
    program: str
    """Training program, as the framework calls it: `train_ppo_ray`, `main_ppo`, `grpo`."""
    command: Command
    """The command of hone for it."""
    given: list[Given]
    processes: int | None = None
    """Number of processes that its launcher starts. None without a launcher."""
    script: tuple[Path, str] | None = None
    """The Python script whose functions settings name as `PATH:NAME`, and its text."""
    notes: list[str] = field(default_factory=list[str])
    """Notes on parts of the script that could not be followed."""


def place(line: int, file: str = "") -> str:
    """Location of a line for comments, with the file's name if it is not the imported one."""
    return f"{file}, line {line}" if file else f"line {line}"


def value_of(text: str) -> Any:
    """The value of a word: a number, true, null, a list; else the text."""
    if "$" in text or "`" in text:
        return Unread(text)
    if text in ("None", "none"):
        return None
    try:
        return parse_value(text)
    except ValueError:
        return text


def text_of(value: Any) -> str:
    """A value as text, as in the maps of `aliases.yaml` and in comments."""
    if isinstance(value, Unread):
        return value.text
    return (
        str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
    )
