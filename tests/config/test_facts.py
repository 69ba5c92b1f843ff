"""Facts of rules are attributes: a misspelt name is refused as the rule is made, none is unused."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import pytest

from hone import rules
from hone.config.rules.facts import Facts
from hone.config.rules.rule import Rule, error, warning, with_facts
from hone.config.rules.view import Fact
from hone.trainer.rules import TrainerFacts
from tests.tables import table

CLASSES = {Facts, *(rule.facts for rule in rules.RULES)}


def unread(
    classes: Iterable[type[Facts]], table: Iterable[Rule], sources: Iterable[str]
) -> set[str]:
    """Facts of these classes that no rule and no code reads."""
    read = {name for rule in table for name in rule.facts_read()}
    for source in sources:
        read |= {
            node.attr
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "view")
        }
    return {name for facts in classes for name in facts.names() if name in vars(facts)} - read


def test_every_fact_is_read() -> None:
    modules = {facts.__module__ for facts in CLASSES}
    assert len(modules) > 10
    assert not unread(CLASSES, rules.RULES, [inspect.getsource(sys.modules[x]) for x in modules])


def test_no_two_parts_have_a_fact_of_the_same_name() -> None:
    """`hone.rules` reads all facts from one object."""
    own = [name for facts in CLASSES for name in facts.names() if name in vars(facts)]
    assert len(own) == len(set(own)) > 100


class PlantedFacts(TrainerFacts):
    @cached_property
    def num_cores(self) -> Fact[int]:
        return Fact(8, "the number of cores")


def test_planted_a_fact_that_nothing_reads() -> None:
    asked = with_facts(PlantedFacts, error("@num_cores > 4"))
    for reader, source in ((asked, ""), ((), "view.num_cores.value")):
        assert unread([PlantedFacts], reader, [source]) == set()
    assert unread([PlantedFacts], with_facts(PlantedFacts, error("run.steps")), [""]) == {
        "num_cores"
    }


@table(
    "rule",
    [
        error("@num_core > 4"),
        error("not @num_core"),
        warning("run.steps", given=("@num_core",)),
        error("run.steps > @num_core"),
        error("run.steps = 1|@num_core"),
        error("run.steps", fix="run.steps = {num_core}"),
        error("run.steps", why="there are {num_core}"),
        error(says="{num_core}"),
        error(each="@num_core"),
    ],
)
def test_planted_a_misspelt_fact_is_refused_as_the_rule_is_made(rule: Rule) -> None:
    sound = error("@num_cores > 4", "@longest > 9", fix="run.steps = {num_cores} or {run.steps}")
    with pytest.raises(AttributeError, match="'num_core', which PlantedFacts does not have") as it:
        with_facts(PlantedFacts, sound, rule)
    assert str(it.value).endswith("Did you mean 'num_cores'?")


def test_a_place_may_name_a_key_or_a_detail() -> None:
    def each(view: PlantedFacts) -> list[dict[str, Any]]:
        return [{"folder": "a"}]

    for rule in (
        error("output", says="{output} and {run.steps}"),
        error(each=each, says="{folder}"),
    ):
        assert with_facts(PlantedFacts, rule)[0].facts is PlantedFacts


def test_facts_of_another_part_are_refused() -> None:
    """The rules of one part do not read what lies with another."""
    with pytest.raises(AttributeError, match="'num_layers', which Facts does not have"):
        with_facts(Facts, error("@num_layers > 4"))


def test_what_is_read_of_the_plan_itself_is_no_fact() -> None:
    names = PlantedFacts.names()
    assert names >= {"num_cores", "num_layers", "longest"}
    assert not names & {"command", "model", "plan", "key"}
