"""Runs the commands that between them make each key of a tree be read, and judges what was read.

`tests.config.trees` names the runs, and the keys that nobody reads.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from hone.config import schema
from hone.config.base import Section
from hone.config.tree import TREES
from tests.config.key_reads import KeyReads, Readers
from tests.config.row import Row
from tests.config.trees import REFUSED_RUNS, WALKED
from tests.config.walk import Seen, both, observe

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Recorded:
    """What the recorded runs of a tree have read, and what the smallest one left."""

    readers: Readers
    seen: Seen
    failed: tuple[str, ...]
    """Runs that neither ended well nor were stopped on purpose, with what they said."""


def smallest(tree: str, flags: tuple[str, ...] = ()) -> tuple[str, tuple[str, ...], None]:
    """The smallest run of a tree, with further flags."""
    command, flags, _ = both(tree, "run.seed", Row("0", "samples", flags))[0]
    return command, flags, None


def record(tree: str, inputs: Path, folder: Path) -> Recorded:
    """Run what reads the keys of a tree."""
    readers: Readers = {}
    every: list[Seen] = []
    failed: list[str] = []
    for number, flags in enumerate(((), *WALKED[tree].runs)):
        reads = KeyReads(tree)
        with pytest.MonkeyPatch.context() as patch:
            reads.record(patch)
            every.append(observe(inputs, folder / f"read-{number}", *smallest(tree, flags)))
        if every[-1]["exit"] not in (0, "stopped") and flags not in REFUSED_RUNS:
            failed.append(f"{tree} {' '.join(flags)}: {every[-1]['log'][-600:]}")
        for key, names in reads.readers.items():
            readers.setdefault(key, set()).update(names)
    return Recorded(readers, every[0], tuple(failed))


def unread(tree: str, readers: Readers) -> list[str]:
    """What is wrong with the reads of a tree: keys that nobody reads, and notes of `Tree.unread`
    that no longer hold. Keys that a rule says to have no effect need no reader."""
    wrong: list[str] = []
    for key, row in WALKED[tree].rows.items():
        why = WALKED[tree].unread.get(key)
        is_useless = row.shows.startswith("log:") and "no effect" in row.shows
        if key not in readers and why is None and not is_useless:
            wrong.append(f"{key}: no recorded run of `hone {tree}` reads it")
        elif key in readers and why is not None:
            wrong.append(f"{key} is said to be unread, and is read by {sorted(readers[key])}")
        elif why is not None and why.source is not None and not _names(why.source, why.attribute):
            wrong.append(f"{key} is said to be read in {why.source}, which names no such attribute")
    gone = WALKED[tree].unread.keys() - WALKED[tree].rows.keys()
    return [*wrong, *(f"{key} is said to be unread, and is no key" for key in sorted(gone))]


@cache
def _names(source: str, attribute: str) -> bool:
    """Whether a file reads an attribute of that name."""
    nodes = ast.walk(ast.parse((ROOT / source).read_text(encoding="utf-8")))
    return any(isinstance(node, ast.Attribute) and node.attr == attribute for node in nodes)


def section_file(tree: str, key: str) -> str:
    """The file of the class that defines a key, from the root of the repository."""
    path = tuple(key.split("."))
    owner = schema.locate(TREES[tree], path[:-1]) if len(path) > 1 else None
    section = TREES[tree] if owner is None else owner.annotation
    return _file_of(_defining(section, path[-1]))


def _defining(section: type[Section], name: str) -> str:
    found = (base for base in section.__mro__ if name in inspect.get_annotations(base))
    return next(found, section).__module__


def _file_of(module: str) -> str:
    name = f"src/{module.replace('.', '/')}"
    return f"{name}.py" if (ROOT / f"{name}.py").exists() else f"{name}/__init__.py"


BUDGET_S = 30.0
"""Of the effects that the quick suite looks at."""


def changed_keys(tree: str, changed_files: set[str], readers: Readers) -> list[str]:
    """Keys whose row, readers or section lie in changed files, those nearest to the change first:
    a row is of one key, a reader of a few, and a section of many. Equals go by their name."""
    return [key for _, key in _changed(tree, changed_files, readers)]


def _changed(tree: str, files: set[str], readers: Readers) -> Iterator[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for key, row in WALKED[tree].rows.items():
        read_in = {_file_of(name.partition(":")[0]) for name in readers.get(key, ())}
        if (why := WALKED[tree].unread.get(key)) is not None and why.source is not None:
            read_in.add(why.source)
        near = (set(row.files), read_in, {section_file(tree, key)})
        if (distance := next((n for n, each in enumerate(near) if each & files), None)) is not None:
            found.append((distance, key))
    yield from sorted(found)


def affordable(
    files: set[str], readers: Mapping[str, Readers], budget_s: float = BUDGET_S
) -> tuple[list[tuple[str, str]], int]:
    """Trees and keys whose effects the quick suite looks at, and how many it leaves to the whole
    one."""
    found = [(*near, tree) for tree in readers for near in _changed(tree, files, readers[tree])]
    chosen: list[tuple[str, str]] = []
    spent = 0.0
    for _, key, tree in sorted(found):
        if spent + WALKED[tree].cost_s <= budget_s:
            spent += WALKED[tree].cost_s
            chosen.append((tree, key))
    return chosen, len(found) - len(chosen)
