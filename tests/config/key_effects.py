"""The walk over the keys by running: two runs a key, and what differs between them."""

from __future__ import annotations

import re
from functools import cache
from itertools import count
from pathlib import Path

from tests.config.row import Row
from tests.config.walk import Seen, both, observe, write_walk_inputs


class Walk:
    """Runs of the table, each made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "inputs"
        self.folder.mkdir()
        write_walk_inputs(self.folder)
        numbers = count()

        @cache
        def see(command: str, flags: tuple[str, ...], before: tuple[str, ...] | None) -> Seen:
            work = folder / f"run-{next(numbers)}"
            return observe(self.folder, work, command, flags, before)

        self.see = see


def complaint(walk: Walk, tree: str, key: str, row: Row) -> str | None:
    """What is wrong with a row; None where the key shows what it should."""
    without, with_key = (walk.see(*run) for run in both(tree, key, row))
    if row.shows.startswith("log:"):
        pattern = row.shows.removeprefix("log:")
        found = [bool(re.search(pattern, seen["log"])) for seen in (without, with_key)]
        return None if found == [False, True] else f"{key}: {pattern!r} is said: {found}"
    for seen in (without, with_key):
        if seen["exit"] not in (0, "stopped") and row.shows != "exit" and row.command is None:
            return f"{key}: a run ended with {seen['exit']}: {seen['log'][-600:]}"
    if row.shows not in without and row.shows not in with_key:
        return f"{key}: nothing called {row.shows} was seen"
    if without.get(row.shows) == with_key.get(row.shows):
        return f"{key}={row.value} changes nothing in {row.shows}"
    return None
