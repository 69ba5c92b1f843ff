"""What a script or file of another framework sets, as it was given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from hone.config.recipe import parse_value

__all__ = ["Command", "Given", "Source", "Unread", "Word", "place", "text_of", "value_of"]

Command = Literal["rl", "sft", "dpo", "reward-model"]


class Word(NamedTuple):
    """A word of a command."""

    text: str
    line: int
    """Where it was written: of what an array holds, where that was filled."""
    file: str = ""
    """That has the line, where it is another than the one that is imported."""

    @property
    def where(self) -> str:
        """Its place, for comments."""
        return place(self.line, self.file) if self.line else "command"


class Given(NamedTuple):
    """A setting."""

    name: str
    """Its dotted path, without dashes and with _ for -."""
    value: Any
    where: str
    """For comments, such as `line 12` or `env.sh, line 3`; empty for a default of the framework."""


@dataclass(frozen=True, slots=True)
class Unread:
    """A value that is known only when the script runs."""

    text: str
    is_expression: bool = False
    """Of a program: no text in which something is to be filled in, as `$ROOT/model` is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """All that a script sets for one run."""

    framework: str
    program: str
    """What it trains with, as the framework calls it: `train_ppo_ray`, `main_ppo`, `grpo`."""
    command: Command
    """The command of ours that does it."""
    given: list[Given]
    processes: int | None = None
    """That its launcher starts; None where it has none."""
    notes: list[str] = field(default_factory=list[str])
    """What of the script could not be followed."""


def place(line: int, file: str = "") -> str:
    """A line, for comments; of another file than the one that is imported with its name."""
    return f"{file}, line {line}" if file else f"line {line}"


def value_of(text: str) -> Any:
    """The value that a word stands for: a number, true, null, a list; else the text."""
    if "$" in text or "`" in text:
        return Unread(text)
    if text in ("None", "none"):
        return None
    try:
        return parse_value(text)
    except ValueError:
        return text


def text_of(value: Any) -> str:
    """A value as the maps of `aliases.yaml` and comments write it."""
    if isinstance(value, Unread):
        return value.text
    return (
        str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
    )
