"""Engines apart from the trainer, in threads of this process: every mode trains as it should."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.loops.conftest import MakeConfig
from tests.tiny_runs import assert_all_learn_as_much, learning_config

from hone.config.tree import RLConfig
from hone.loops import reinforce

APART: dict[str, Any] = {"num_engines": 2}
MODES = ("pause", "abort", "finish")


def run(cfg: RLConfig) -> list[dict[str, float]]:
    """The rows of a run."""
    reinforce.run(cfg)
    return [json.loads(line) for line in (cfg.run.dir / "metrics.jsonl").read_text().splitlines()]


def weights(cfg: RLConfig) -> dict[str, torch.Tensor]:
    return load_file(cfg.run.dir / "model" / "model.safetensors")


def trained(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_R19_engines_apart_and_staleness_0_are_the_synchronous_run(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Batches of the engines differ, so the last bits of log-probabilities may."""
    beside = make_config(run={"dir": tmp_path / "beside"}, log={"samples_per_step": 99})
    apart = make_config(
        run={"dir": tmp_path / "apart"}, cluster=APART, log={"samples_per_step": 99}
    )
    ahead = make_config(
        run={"dir": tmp_path / "ahead"},
        cluster=APART,
        pipeline={"enabled": True, "max_staleness": 0},
        log={"samples_per_step": 99},
    )
    expected, told = run(beside), trained(beside.run.dir)
    for cfg in (apart, ahead):
        rows = run(cfg)
        assert [row["reward/mean"] for row in rows] == [row["reward/mean"] for row in expected]
        assert [s["token_ids"] for s in trained(cfg.run.dir)] == [s["token_ids"] for s in told]
        for name, value in weights(beside).items():
            torch.testing.assert_close(weights(cfg)[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("in_flight", MODES)
def test_R19_every_prompt_is_trained_once_within_the_bound(
    make_config: MakeConfig, in_flight: str
) -> None:
    """Through evaluations, checkpoints and a second launch that goes on."""
    sections: dict[str, Any] = {
        "cluster": APART,
        "pipeline": {
            "enabled": True,
            "max_staleness": 2,
            "async_queue_size": 2,
            "in_flight": in_flight,
        },
        "algorithm": {"correction": {"kind": "tis"}},
        "eval": {"every_n_steps": 3},
        "checkpoint": {"every_n_steps": 2},
        "log": {"samples_per_step": 99},
    }
    run(make_config(run={"steps": 5}, **sections))
    rows = run(make_config(run={"steps": 10}, **sections))
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert all(row["rollout/staleness/max"] <= 2 for row in rows)
    assert rows[-1]["rollout/staleness/max"] > 0
    samples = trained(make_config().run.dir)
    # 80 prompts, 4 a step and 4 samples each: none comes again within 20 steps.
    assert Counter(s["prompt_id"] for s in samples) == Counter({s["prompt_id"]: 4 for s in samples})
    assert len(samples) == 10 * 4 * 4
    for sample in samples:
        step = sample["step"]
        assert all(0 <= step - 1 - version <= 2 for version in sample["weight_versions"]), sample


def test_R4_the_gate_stands_before_a_run_ahead_of_its_training_too(
    make_config: MakeConfig,
) -> None:
    """The samples of the first step are fresh: it compares them, and each step those that are."""
    cfg = make_config(
        run={"steps": 1}, cluster=APART, pipeline={"enabled": True, "max_staleness": 1}
    )
    (row,) = run(cfg)
    assert row["off_policy/parity/kl"] < 1e-6
    assert row["off_policy/mismatch_kl"] < 1e-6
    assert row["rollout/staleness/max"] == 0


def test_masks_of_interrupted_samples_leave_every_update_something(
    make_config: MakeConfig,
) -> None:
    """A sample that is old, but of one version, is trained whole."""
    cfg = make_config(
        run={"steps": 6},
        cluster=APART,
        pipeline={"enabled": True, "max_staleness": 2},
        rollout={"mask_off_policy_tokens": True},
        algorithm={"correction": {"kind": "tis"}},
    )
    rows = run(cfg)
    assert max(row["rollout/staleness/max"] for row in rows) > 0
    assert [row["train/untrained_steps"] for row in rows] == [0] * 6
    sampled = [row["rollout/num_tokens"] for row in rows]
    assert all(row["train/num_tokens"] > n / 4 for row, n in zip(rows, sampled, strict=True))


def test_separate_engines_serve_two_trainers_evaluation_and_adapters(
    make_config: MakeConfig,
) -> None:
    rows = run(
        make_config(
            cluster=APART,
            model={"path": make_config().model.path, "lora": {"rank": 2}},
            eval={"at_start": True, "every_n_steps": 1},
            rollout=make_config().rollout.model_dump() | {"oversample_prompts": 2},
        )
    )
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all("eval/reward/mean" in row for row in rows)


LEARNING: dict[str, dict[str, Any]] = {
    "beside": {},
    "carried over": {"rollout": {"oversample_prompts": 4}},
    "apart": {"cluster": APART},
    "ahead, paused": {"cluster": APART, "pipeline": {"enabled": True, "max_staleness": 1}},
    "ahead, put back": {
        "cluster": APART,
        "pipeline": {
            "enabled": True,
            "max_staleness": 2,
            "async_queue_size": 2,
            "in_flight": "abort",
        },
    },
}


@pytest.mark.slow
def test_every_mode_learns_as_much(inputs: Path, tmp_path: Path) -> None:
    """In three seeds each; tests/cluster does the same on Ray."""
    rewards: dict[str, list[list[float]]] = {}
    for mode, sections in LEARNING.items():
        for seed in range(3):
            cfg = learning_config(inputs, tmp_path / f"{mode} {seed}", seed=seed, **sections)
            rewards.setdefault(mode, []).append([row["reward/mean"] for row in run(cfg)])
    assert_all_learn_as_much(rewards)


@pytest.mark.parametrize("reward", [lambda step: 0.5, lambda step: 0.3 + 0.02 * step])
def test_planted_a_mode_that_learns_less_is_seen(reward: Callable[[int], float]) -> None:
    good, worse = [0.3 + 0.03 * step for step in range(20)], [reward(step) for step in range(20)]
    assert_all_learn_as_much({"good": [good], "as good": [good]})
    with pytest.raises(AssertionError):
        assert_all_learn_as_much({"good": [good] * 3, "worse": [worse] * 3})
