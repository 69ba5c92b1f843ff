"""Arguments that several commands read alike: the action of a command, and flags with a number."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from hone.cli.command import take_word
from hone.errors import UserError

__all__ = ["Actions", "run_action", "take_number"]

Actions = Mapping[str, Callable[[list[str]], int]]
"""What runs each action of a command, by its name: from the words after it to the exit code."""
D = TypeVar("D", bound=int | None)


def run_action(command: str, actions: Actions, usage: str, argv: Sequence[str]) -> int:
    """Run the action that the first word names, and return its exit code; `command` is `hone ...`,
    without the action. Writes the usage where help or nothing is asked for. Raises UserError for a
    word that names no action."""
    words = list(argv)
    if not words or any(word in ("-h", "--help") for word in words):
        sys.stdout.write(usage)
        return 0
    action = words.pop(0)
    if action not in actions:
        *names, last = actions
        raise UserError(
            f"`{command}` takes {', '.join(names)} or {last}, got {action!r}; see `{command} "
            "--help`"
        )
    return actions[action](words)


def take_number(flag: str, argv: Sequence[str], default: D) -> tuple[int | D, list[str]]:
    """Take `flag` and its value out of the arguments. Returns the value, or `default` where the
    flag is not given, and the rest. Raises UserError for a value that is no whole number above 0,
    and for a flag that is given twice."""
    given, words = take_word(flag, argv)
    if given is None:
        return default, words
    if not given.isdecimal() or int(given) == 0:
        raise UserError(f"{flag} takes a whole number above 0, got {given!r}")
    return int(given), words
