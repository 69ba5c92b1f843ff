"""Every key of every tree is read by the command that takes it, or it is noted why not.

A few runs a tree record which keys are read, and by whom (`key_reads.py`, `recorded_runs.py`); a
key that nobody reads has no effect. That what is read also changes something takes two runs a key
(`test_key_effects.py`); here that is looked at for keys near a change, as `HONE_CHANGED_FILES`
names its files, within a budget.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hone.config import schema
from hone.config.base import Section
from hone.config.tree import TREES, RLConfig
from tests.config.key_effects import Walk, complaint
from tests.config.key_reads import KeyReads
from tests.config.recorded_runs import (
    Recorded,
    affordable,
    changed_keys,
    record,
    section_file,
    smallest,
    unread,
)
from tests.config.row import Row
from tests.config.trees import WALKED, Unread
from tests.config.walk import observe
from tests.config.walk_rows.simulated import NOT_OF_TIME
from tests.tables import check_rows


class Walks(Walk):
    """Runs with their effects, and recorded ones, each made once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)

        @cache
        def recorded(tree: str) -> Recorded:
            (own := folder / tree.replace(" ", "-")).mkdir()
            return record(tree, self.folder, own)

        self.recorded = recorded


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walks:
    return Walks(tmp_path_factory.mktemp("walk"))


def leaves(tree: type[Section]) -> Iterator[str]:
    for field in schema.fields(tree):
        if not schema.is_section(field.annotation):
            yield field.key


def test_every_key_has_a_row_and_every_row_a_key() -> None:
    def check(tree: str) -> None:
        keys = set(leaves(TREES[tree]))
        if tree == "plan":
            keys -= {key for key in leaves(RLConfig) if f"{key}.".startswith(NOT_OF_TIME)}
        assert set(WALKED[tree].rows) == keys

    check_rows([*TREES], check, minimum=9)


@pytest.mark.parametrize("tree", TREES)
def test_every_key_is_read(walk: Walks, tree: str) -> None:
    recorded = walk.recorded(tree)
    wrong = [*recorded.failed, *unread(tree, recorded.readers)]
    assert not wrong, "\n".join(wrong)


def test_a_run_repeated_shows_the_same(walk: Walks) -> None:
    """Otherwise a difference would prove nothing. That the first was recorded shows nowhere."""

    def check(tree: str) -> None:
        first = walk.recorded(tree).seen
        again = observe(walk.folder, walk.folder.parent / "again", *smallest(tree))
        names = set(first) - {"log", "Watch"}
        assert {name: first[name] for name in names} == {name: again[name] for name in names}

    check_rows([*TREES], check, minimum=9)


def test_keys_near_the_change_have_an_effect(walk: Walks) -> None:
    if not (files := set(os.environ.get("HONE_CHANGED_FILES", "").split("\n")) - {""}):
        pytest.skip("HONE_CHANGED_FILES names no changed file: the whole suite looks at effects")
    readers = {tree: walk.recorded(tree).readers for tree in TREES}
    chosen, num_left = affordable(files, readers)
    print(f"effects of {len(chosen)} keys; {num_left} are left to the whole suite")  # noqa: T201
    if not chosen:
        pytest.skip(f"no key is near the change; {num_left} are left to the whole suite")

    def check(tree: str, key: str) -> None:
        wrong = complaint(walk, tree, key, WALKED[tree].rows[key])
        assert wrong is None, wrong

    check_rows(chosen, check)


def test_a_key_without_effect_is_noticed(walk: Walks) -> None:
    """A value that is the default's own, in the place of a key that nothing reads."""
    dead = Row("0.0", "metrics")
    told = complaint(walk, "rl", "algorithm.entropy_coef", dead)
    assert told == "algorithm.entropy_coef=0.0 changes nothing in metrics"


def caller_in(module: str, call: Any) -> Any:
    """A function of that module that calls another one."""
    space: dict[str, Any] = {"__name__": module, "call": call}
    exec("def caller(section):\n    return call(section)", space)
    return space["caller"]


def reader_in(module: str, expression: str) -> Any:
    space: dict[str, Any] = {"__name__": module}
    exec(f"def reader(section):\n    return {expression}", space)
    return space["reader"]


LOOP = "hone.loops.run"
EVERY, STARTS = "eval.every_n_steps", "eval.at_start"
READS: dict[str, tuple[str, str, tuple[str, ...], set[str]]] = {
    "a loop": (LOOP, "section.eval.every_n_steps", (), {EVERY}),
    "a property, for a loop": (LOOP, "section.eval.is_scheduled", (), {EVERY, STARTS}),
    "a copy with another value": (
        LOOP,
        "(c := section.eval.model_copy(update={'every_n_steps': 7})).every_n_steps + c.at_start",
        (),
        {STARTS},
    ),
    "a dump": (LOOP, "section.model_dump(), section.model_dump_json(), repr(section)", (), set()),
    "a comparison": (LOOP, "section == section.model_copy(deep=True)", (), set()),
    "a rule": ("hone.config.rules.rule", "section.eval.every_n_steps", (), set()),
    "a rule, by a loop": ("hone.config.rules.rule", "section.eval.every_n_steps", (LOOP,), set()),
    "a loop's helper, by a rule": (
        LOOP,
        "section.eval.every_n_steps",
        ("hone.config.rules.rule", "hone.cli.rl"),
        set(),
    ),
    "a validator": ("hone.config.run", "section.eval.every_n_steps", ("pydantic.main",), set()),
    "the loading": ("hone.config.load", "section.eval.every_n_steps", ("hone.cli.rl",), set()),
    "hone check": (LOOP, "section.eval.every_n_steps", ("hone.cli.check",), set()),
    "a plan": ("hone.tools.plan.search", "section.eval.every_n_steps", ("hone.cli.rl",), set()),
    "a test": ("tests.config.walk", "section.eval.every_n_steps", (LOOP,), set()),
}


def test_only_what_a_run_reads_counts() -> None:
    def check(
        reader: str, expression: str, callers: tuple[str, ...], keys: set[str], tree: str = "rl"
    ) -> None:
        reads, call = KeyReads(tree), reader_in(reader, expression)
        for module in callers:
            call = caller_in(module, call)
        with pytest.MonkeyPatch.context() as patch:
            reads.record(patch)
            call(reads.placed(TREES["sft"](model={"path": "m"}, data={"train": ({"path": "d"},)})))
        assert {key for key in reads.readers if key in set(leaves(TREES["sft"]))} == keys

    check_rows(READS, check)
    check(
        "hone.tools.plan.search", "section.eval.every_n_steps", ("hone.cli.plan",), {EVERY}, "plan"
    )


def test_a_key_that_nobody_reads_is_named(walk: Walks, monkeypatch: pytest.MonkeyPatch) -> None:
    readers = walk.recorded("generate").readers
    monkeypatch.setitem(WALKED["generate"].rows, "planted", Row("1", "samples"))
    assert unread("generate", readers) == ["planted: no recorded run of `hone generate` reads it"]
    monkeypatch.delitem(WALKED["generate"].rows, "planted")
    assert len(unread("generate", {})) > 40, "where nothing is recorded, nearly all keys are named"


def test_a_note_that_a_key_is_unread_must_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = "trainer.parallel.reference_ring_size"
    every = {key: {"hone.loops.run:Run"} for key in WALKED["sft"].rows}
    wrong = unread("sft", every)
    assert f"{ring} is said to be unread, and is read by ['hone.loops.run:Run']" in wrong
    gone = Unread("no more", "src/hone/loops/run.py", "reference_ring_size")
    planted = replace(WALKED["sft"], unread={ring: gone, "no.such": gone})
    monkeypatch.setitem(WALKED, "sft", planted)
    wrong = unread("sft", {key: every[key] for key in every if key != ring})
    assert wrong == [
        f"{ring} is said to be read in src/hone/loops/run.py, which names no such attribute",
        "no.such is said to be unread, and is no key",
    ]


def test_keys_near_a_change_come_first_and_fit_the_budget() -> None:
    readers = {
        "sft": {EVERY: {"hone.loops.run:Run.finish"}, "log.to": {"hone.observe.trackers:start"}}
    }
    near = changed_keys("sft", {"src/hone/loops/run.py", "src/hone/config/run.py"}, readers["sft"])
    assert near[0] == EVERY
    assert {"run.steps", "log.to", STARTS} < set(near)
    assert "model.path" not in near
    assert changed_keys("sft", {"docs/index.md"}, readers["sft"]) == []
    rows = changed_keys("sft", {"tests/config/walk_rows/training.py"}, readers["sft"])
    assert "data.max_tokens" in rows
    assert "trainer.optimizer.lr" in changed_keys("sft", {"tests/config/walk_rows/shared.py"}, {})
    assert section_file("sft", "data.train.0.path") == "src/hone/data/settings.py"
    assert section_file("generate", "keep") == "src/hone/config/tree.py"
    chosen, num_left = affordable({"src/hone/loops/run.py"}, readers)
    assert (chosen, num_left) == ([("sft", EVERY)], 0)
    chosen, num_left = affordable({"src/hone/config/run.py"}, readers, budget_s=5.0)
    assert len(chosen) == 3
    assert num_left > 3
