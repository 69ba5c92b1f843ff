"""Where roles live and who waits for whom costs no learning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from hone.config.load import dump_config
from tests.ranks import run_ranks
from tests.tiny_runs import assert_all_learn_as_much, learning_config, write_inputs

SEEDS = range(3)
MODES: dict[str, dict[str, Any]] = {
    "hybrid": {},
    "hybrid, carried over": {"rollout": {"oversample_prompts": 4}},
    "separate": {"cluster": {"num_engines": 2}},
    "policy and reference paired": {
        "cluster": {"num_engines": 1},
        "algorithm": {"kl": {"coef": 0.001}},
    },
    "ahead, paused": {
        "cluster": {"num_engines": 2},
        "pipeline": {"enabled": True, "max_staleness": 1},
    },
    "ahead, put back": {
        "cluster": {"num_engines": 2},
        "pipeline": {"enabled": True, "max_staleness": 2, "in_flight": "abort"},
    },
}
NUM_TRAINERS = 2


@contextmanager
def ray_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a Ray that outlives its drivers, for all runs to join."""
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # no token in the home folder
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 4, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield cluster.address
    finally:
        cluster.shutdown()


def write_recipe(folder: Path, mode: str, seed: int, address: str) -> Path:
    sections = MODES[mode]
    if "cluster" in sections:
        joined = {"num_trainers": NUM_TRAINERS, "address": address}
        sections = sections | {"cluster": sections["cluster"] | joined}
    name = f"{mode} {seed}"
    recipe = folder / f"{name}.yaml"
    recipe.write_text(dump_config(learning_config(folder, folder / name, seed=seed, **sections)))
    return recipe


def rewards_of(recipe: Path) -> list[float]:
    lines = (recipe.with_suffix("") / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["reward/mean"] for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_mode_learns_as_much_on_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trainers that share the work, with up to two engines apart, in three seeds each."""
    write_inputs(tmp_path)
    with ray_cluster(monkeypatch) as address:
        recipes = {
            mode: [write_recipe(tmp_path, mode, seed, address) for seed in SEEDS] for mode in MODES
        }
        run_ranks(
            "tests.cluster.learning_runs", 1, NUM_TRAINERS, *chain(*recipes.values()), timeout_s=800
        )
    assert_all_learn_as_much({mode: list(map(rewards_of, own)) for mode, own in recipes.items()})
