"""Runs over sources with limits: each step has its rows, however often a run is started."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tests.loops.conftest import MakeConfig
from tests.loops.test_processes import assert_same_run
from tests.tiny_runs import lines

from hone.config.tree import SFTConfig
from hone.data.arithmetic import generate, write_jsonl
from hone.loops import reinforce, supervised

NUM_STEPS = 5


def sources(folder: Path) -> list[dict[str, Any]]:
    """One without limits, one of 6 rows twice, and one of the steps 2 and 3."""
    (data := folder / "data").mkdir()
    for number, name in enumerate(("all", "twice", "early")):
        rows = generate(40 if name != "twice" else 6, seed=number, low=0, high=9)
        write_jsonl(data / f"{name}.jsonl", [x | {"completion": x["answer"]} for x in rows])
    return [
        {"path": str(data / "all.jsonl")},
        {"path": str(data / "twice.jsonl"), "max_epochs": 2},
        {"path": str(data / "early.jsonl"), "weight": 2, "from_step": 2, "until_step": 3},
    ]


def drawn(run_dir: Path, step: int) -> dict[str, float]:
    """`data/drawn/` of a step, by source."""
    prefix = "data/drawn/"
    row = next(row for row in lines(run_dir / "metrics.jsonl") if row["step"] == step)
    return {key.removeprefix(prefix): x for key, x in row.items() if key.startswith(prefix)}


def test_prompts_come_from_the_sources_of_their_step(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {
        "data": {"train": sources(tmp_path)},
        "rollout": {"prompts_per_step": 4, "n_samples_per_prompt": 2},
        "log": {"samples_per_step": 99, "to": []},
        "checkpoint": {"every_n_steps": 1},
    }
    whole = make_config(run={"dir": tmp_path / "whole", "steps": NUM_STEPS}, **sections)
    reinforce.run(whole)
    for steps in (1, 3, 4, NUM_STEPS):
        reinforce.run(make_config(run={"dir": tmp_path / "parts", "steps": steps}, **sections))
    assert_same_run(whole.run.dir, tmp_path / "parts")
    # Of 12 rows of the second source, steps 1 to 4 have 6; it ends in no step of this run.
    expected = [
        {"all": 2, "twice": 2, "early": 0},
        {"all": 1, "twice": 1, "early": 2},
        {"all": 1, "twice": 1, "early": 2},
        {"all": 2, "twice": 2, "early": 0},
        {"all": 2, "twice": 2, "early": 0},
    ]
    samples = lines(whole.run.dir / "samples.jsonl")
    for step, counts in enumerate(expected, start=1):
        assert drawn(whole.run.dir, step) == counts, step
        own = {x["prompt_id"] for x in samples if x["step"] == step and x["split"] == "train"}
        names = Counter(name.partition(":")[0] for name in own)
        assert names == Counter({name: n for name, n in counts.items() if n}), step


def test_a_step_that_draws_again_keeps_its_shares(make_config: MakeConfig, tmp_path: Path) -> None:
    """With dynamic sampling, of which most groups have no variance."""
    cfg = make_config(
        run={"dir": tmp_path / "run", "steps": NUM_STEPS},
        data={"train": sources(tmp_path)},
        rollout={"prompts_per_step": 4, "n_samples_per_prompt": 2, "dynamic_sampling": True},
    )
    reinforce.run(cfg)
    totals = [drawn(cfg.run.dir, step) for step in range(1, NUM_STEPS + 1)]
    assert any(sum(counts.values()) > 4 for counts in totals)
    assert sum(counts["twice"] for counts in totals) <= 12
    for step, counts in enumerate(totals, start=1):
        assert bool(counts["early"]) == (step in (2, 3)), step
        if step in (2, 3) and counts["twice"]:
            assert abs(counts["early"] - sum(counts.values()) / 2) < 2


def test_demonstrations_come_from_the_sources_of_their_step(
    sft_config: SFTConfig, tmp_path: Path
) -> None:
    tree = sft_config.model_dump()
    tree["data"] |= {
        "train": sources(tmp_path),
        "eval_fraction": 0.0,
        "examples_per_step": 8,
        "shuffle_window": 16,
    }
    tree["eval"]["every_n_steps"] = 0
    tree["checkpoint"]["every_n_steps"] = 1
    tree["run"]["steps"] = NUM_STEPS
    whole = SFTConfig.model_validate(tree)
    supervised.run(whole)
    for steps in (2, 3, NUM_STEPS):
        tree["run"] |= {"dir": tmp_path / "parts", "steps": steps}
        supervised.run(SFTConfig.model_validate(tree))
    assert_same_run(whole.run.dir, tmp_path / "parts")
    # The second source ends after 12 rows, which are 4, 2, 2 and 4.
    assert [drawn(whole.run.dir, step) for step in range(1, NUM_STEPS + 1)] == [
        {"all": 4, "twice": 4, "early": 0},
        {"all": 2, "twice": 2, "early": 4},
        {"all": 2, "twice": 2, "early": 4},
        {"all": 4, "twice": 4, "early": 0},
        {"all": 8, "twice": 0, "early": 0},
    ]
