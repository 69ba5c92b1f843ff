"""No key is parsed and ignored: each of them, in each tree, changes something that is shown here.

A row of the table (`walk_rows`) names a value for the key, what else it needs, and what differs
between a run with it and a run without: what the run leaves (metrics, samples, files, weights),
what it builds or hands to others where the effect needs a GPU or Ray, a plan of `hone check`, or
what a check says of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from hone.config import schema
from hone.config.base import Section
from hone.config.tree import TREES, RLConfig
from tests.config.walk import Row, Seen, both, observe, write_walk_inputs
from tests.config.walk_rows import NOT_OF_TIME, ROWS

NUM_PARTS = 40
"""Of a tree's rows, so that no test comes near its time limit."""


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


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    return Walk(tmp_path_factory.mktemp("walk"))


def leaves(tree: type[Section]) -> Iterator[str]:
    for field in schema.fields(tree):
        if not schema.is_section(field.annotation):
            yield field.key


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


@pytest.mark.parametrize("tree", TREES)
def test_every_key_has_a_row_and_every_row_a_key(tree: str) -> None:
    keys = set(leaves(TREES[tree]))
    if tree == "plan":
        keys -= {key for key in leaves(RLConfig) if f"{key}.".startswith(NOT_OF_TIME)}
    assert set(ROWS[tree]) == keys


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_every_key_changes_what_its_row_says(walk: Walk, tree: str, part: int) -> None:
    rows = [*ROWS[tree].items()]
    size = -(-len(rows) // NUM_PARTS)
    wrong = [complaint(walk, tree, *row) for row in rows[part * size : (part + 1) * size]]
    assert not any(wrong), "\n".join(filter(None, wrong))


@pytest.mark.parametrize("tree", TREES)
def test_a_run_repeated_shows_the_same(walk: Walk, tree: str) -> None:
    """Otherwise a difference would prove nothing."""
    (run, _) = both(tree, "run.seed", Row("0", "samples"))
    first = walk.see(*run)
    again: dict[str, Any] = observe(walk.folder, walk.folder.parent / "again", *run)
    names = set(first) - {"log", "Watch"}
    assert {name: first[name] for name in names} == {name: again[name] for name in names}


def test_a_key_without_effect_is_noticed(walk: Walk) -> None:
    """A value that is the default's own, in the place of a key that nothing reads."""
    dead = Row("0.0", "metrics")
    told = complaint(walk, "rl", "algorithm.entropy_coef", dead)
    assert told == "algorithm.entropy_coef=0.0 changes nothing in metrics"
