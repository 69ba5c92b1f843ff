"""No key is parsed and ignored: each of them, in each tree, changes something that is shown here.

A row of the table (`walk_rows`) names a value for the key, what else it needs, and what differs
between a run with it and a run without: what the run leaves (metrics, samples, files, weights),
what it builds or hands to others where the effect needs a GPU or Ray, a plan of `hone check`, or
what a check says of it.

Two runs a key take minutes in all. `test_key_walk.py` sees in each run of the suite that every key
is read, and looks at the effects of keys near a change.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from hone.config.tree import TREES
from tests.config.key_effects import Walk, complaint
from tests.config.row import Row
from tests.config.trees import WALKED
from tests.tables import check_rows

PARTS: Mapping[str, tuple[frozenset[str], ...]] = {
    "rl": (
        frozenset({"run", "model", "data"}),
        frozenset({"rollout", "engine", "env", "reward"}),
        frozenset({"algorithm", "teacher", "critic", "pipeline", "cluster"}),
        frozenset({"trainer"}),
        frozenset({"eval", "checkpoint", "log", "profile"}),
    ),
    "sft": (frozenset({"run", "model", "data"}), frozenset({"trainer"})),
    "dpo": (frozenset({"run", "model", "data", "algorithm"}), frozenset({"trainer"})),
    "reward-model": (frozenset({"run", "model", "data", "algorithm"}), frozenset({"trainer"})),
}
"""Sections of a tree whose keys are walked together. What is named nowhere is a tree's last part,
so that no key is left out."""


@pytest.fixture(scope="session")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    return Walk(tmp_path_factory.mktemp("effects"))


def rows_of(tree: str, part: int) -> dict[str, Row]:
    parts = PARTS.get(tree, ())
    named = frozenset[str]().union(*parts)

    def is_here(section: str) -> bool:
        return section in parts[part] if part < len(parts) else section not in named

    return {key: row for key, row in WALKED[tree].rows.items() if is_here(key.partition(".")[0])}


def check_effects(walk: Walk, tree: str, part: int = 0) -> None:
    def check(key: str, row: Row) -> None:
        wrong = complaint(walk, tree, key, row)
        assert wrong is None, wrong

    check_rows({key: (key, row) for key, row in rows_of(tree, part).items()}, check, minimum=10)


def test_parts_have_each_key_once() -> None:
    for tree in TREES:
        every = [key for n in range(len(PARTS.get(tree, ())) + 1) for key in rows_of(tree, n)]
        assert sorted(every) == sorted(WALKED[tree].rows)
    assert not rows_of("rl", 5)


@pytest.mark.slow
def test_effects_of_rl_model_and_data(walk: Walk) -> None:
    check_effects(walk, "rl", 0)


@pytest.mark.slow
def test_effects_of_rl_sampling(walk: Walk) -> None:
    check_effects(walk, "rl", 1)


@pytest.mark.slow
def test_effects_of_rl_learning(walk: Walk) -> None:
    check_effects(walk, "rl", 2)


@pytest.mark.slow
def test_effects_of_rl_trainer(walk: Walk) -> None:
    check_effects(walk, "rl", 3)


@pytest.mark.slow
def test_effects_of_rl_course(walk: Walk) -> None:
    check_effects(walk, "rl", 4)


@pytest.mark.slow
def test_effects_of_sft_data(walk: Walk) -> None:
    check_effects(walk, "sft", 0)


@pytest.mark.slow
def test_effects_of_sft_trainer(walk: Walk) -> None:
    check_effects(walk, "sft", 1)


@pytest.mark.slow
def test_effects_of_sft_course(walk: Walk) -> None:
    check_effects(walk, "sft", 2)


@pytest.mark.slow
def test_effects_of_dpo_data(walk: Walk) -> None:
    check_effects(walk, "dpo", 0)


@pytest.mark.slow
def test_effects_of_dpo_trainer(walk: Walk) -> None:
    check_effects(walk, "dpo", 1)


@pytest.mark.slow
def test_effects_of_dpo_course(walk: Walk) -> None:
    check_effects(walk, "dpo", 2)


@pytest.mark.slow
def test_effects_of_reward_model_data(walk: Walk) -> None:
    check_effects(walk, "reward-model", 0)


@pytest.mark.slow
def test_effects_of_reward_model_trainer(walk: Walk) -> None:
    check_effects(walk, "reward-model", 1)


@pytest.mark.slow
def test_effects_of_reward_model_course(walk: Walk) -> None:
    check_effects(walk, "reward-model", 2)


@pytest.mark.slow
def test_effects_of_eval(walk: Walk) -> None:
    check_effects(walk, "eval")


@pytest.mark.slow
def test_effects_of_generate(walk: Walk) -> None:
    check_effects(walk, "generate")


@pytest.mark.slow
def test_effects_of_serve(walk: Walk) -> None:
    check_effects(walk, "serve")


@pytest.mark.slow
def test_effects_of_bench_engine(walk: Walk) -> None:
    check_effects(walk, "bench engine")


@pytest.mark.slow
def test_effects_of_bench_train(walk: Walk) -> None:
    check_effects(walk, "bench train")


@pytest.mark.slow
def test_effects_of_plan(walk: Walk) -> None:
    check_effects(walk, "plan")
