"""Runs in which prompts rest: the same however often a run is started, on one process or two."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from tests.loops.conftest import MakeConfig
from tests.loops.test_processes import assert_same_run, run_hone
from tests.tiny_runs import lines

from hone.loops import reinforce

STEPS = 6


def sections_of(data: str, **rollout: Any) -> dict[str, Any]:
    """A run over the first rows of the training data, several times."""
    return {
        "data": {
            "train": [{"path": data, "max_rows": 12}],
            "max_prompt_tokens": 8,
            "curriculum": {"pass_rate": [0.3, 0.6], "rest_epochs": 2},
        },
        "rollout": rollout,
        "log": {"samples_per_step": 99},
        "checkpoint": {"every_n_steps": 1},
        "trainer": {"optimizer": {"lr": 1e-3}, "logits_chunk_tokens": 64},
    }


def rates_of(run: Path) -> dict[int, dict[str, float]]:
    """Of each step, the mean reward of each prompt."""
    rewards: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in lines(run / "samples.jsonl"):
        if row["split"] == "train":
            rewards[row["step"]][row["prompt_id"]].append(row["reward"])
    return {
        step: {prompt: sum(own) / len(own) for prompt, own in found.items()}
        for step, found in rewards.items()
    }


def test_R18_a_run_with_resting_prompts_goes_on_after_any_step(
    make_config: MakeConfig, tmp_path: Path, inputs: Path
) -> None:
    sections = sections_of(str(inputs / "train.jsonl"))
    whole = make_config(run={"dir": tmp_path / "whole", "steps": STEPS}, **sections)
    reinforce.run(whole)
    for steps in range(1, STEPS + 1):
        reinforce.run(make_config(run={"dir": tmp_path / "parts", "steps": steps}, **sections))
    assert_same_run(whole.run.dir, tmp_path / "parts")

    rows = lines(whole.run.dir / "metrics.jsonl")
    assert rows[-1]["data/skipped_resting"] > 0
    assert 0 < rows[-1]["data/resting"] < 12
    known: dict[str, float] = {}
    for step, rates in rates_of(whole.run.dir).items():
        known |= rates
        (row,) = [row for row in rows if row["step"] == step]
        assert row["data/pass_rate"] == pytest.approx(sum(known.values()) / len(known))
    drawn = [prompt for rates in rates_of(whole.run.dir).values() for prompt in rates]
    inside = {prompt for prompt, rate in known.items() if 0.3 < rate < 0.6}
    times = {prompt: drawn.count(prompt) for prompt in known}
    assert max(times[x] for x in inside) > min(times.values())


@pytest.mark.slow
@pytest.mark.parametrize("dynamic_sampling", [False, True])
def test_R18_two_processes_let_the_same_prompts_rest(
    make_config: MakeConfig, tmp_path: Path, inputs: Path, dynamic_sampling: bool
) -> None:
    sections = sections_of(str(inputs / "train.jsonl"), dynamic_sampling=dynamic_sampling)
    one = make_config(run={"dir": tmp_path / "one", "steps": STEPS}, **sections)
    reinforce.run(one)
    first = make_config(run={"dir": tmp_path / "two", "steps": STEPS // 2}, **sections)
    run_hone("rl", first, tmp_path, "--nproc=2")
    reinforce.run(make_config(run={"dir": tmp_path / "two", "steps": STEPS}, **sections))
    assert_same_run(one.run.dir, tmp_path / "two")
    assert lines(one.run.dir / "metrics.jsonl")[-1]["data/skipped_resting"] > 0
