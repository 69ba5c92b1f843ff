"""Engines with weights of their own, in threads of this process: every mode trains as it should."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.loops.conftest import MakeConfig
from tests.tiny_runs import assert_all_learn_as_much, learning_config, lines

from hone.config.tree import RLConfig
from hone.distributed.pool import WorkersLostError
from hone.engine.engine import EmbeddedEngine
from hone.loops import reinforce
from hone.loops.run import Outcome
from hone.trainer.trainer import Trainer

APART: dict[str, Any] = {"num_engines": 2}
AHEAD: dict[str, Any] = {
    "pipeline": {"max_staleness": 2},
    "algorithm": {"correction": {"kind": "tis"}},
    "log": {"samples_per_step": 99},
}
MODES = ("pause", "abort", "finish")


def run(cfg: RLConfig) -> list[dict[str, float]]:
    """The rows of a run."""
    reinforce.run(cfg)
    return lines(cfg.run.dir / "metrics.jsonl")


def weights(cfg: RLConfig) -> dict[str, torch.Tensor]:
    return load_file(cfg.run.dir / "model" / "model.safetensors")


def trained(folder: Path) -> list[dict[str, Any]]:
    return [row for row in lines(folder / "samples.jsonl") if row["split"] == "train"]


def test_R19_engines_apart_and_staleness_0_are_the_synchronous_run(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Batches of the engines differ, so the last bits of log-probabilities may."""
    log = {"samples_per_step": 99}
    beside = make_config(run={"dir": tmp_path / "beside"}, log=log)
    apart = make_config(run={"dir": tmp_path / "apart"}, log=log, cluster=APART)
    expected, rows = run(beside), run(apart)
    assert [row["reward/mean"] for row in rows] == [row["reward/mean"] for row in expected]
    tokens = [[s["token_ids"] for s in trained(cfg.run.dir)] for cfg in (apart, beside)]
    assert tokens[0] == tokens[1]
    for name, value in weights(beside).items():
        torch.testing.assert_close(weights(apart)[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("in_flight", MODES)
def test_R19_every_prompt_is_trained_once_within_the_bound(
    make_config: MakeConfig, in_flight: str
) -> None:
    """Through evaluations, checkpoints and a second launch that goes on."""
    sections: dict[str, Any] = {
        "cluster": APART,
        "pipeline": {
            "max_staleness": 2,
            "in_flight": in_flight,
        },
        "algorithm": {"correction": {"kind": "tis"}},
        "eval": {"every_n_steps": 3},
        "checkpoint": {"every_n_steps": 2},
        "log": {"samples_per_step": 99},
    }
    run(make_config(run={"steps": 3}, **sections))
    rows = run(make_config(run={"steps": 7}, **sections))
    assert [row["step"] for row in rows] == list(range(1, 8))
    assert all(row["rollout/staleness/max"] <= 2 for row in rows)
    assert rows[-1]["rollout/staleness/max"] > 0
    samples = trained(make_config().run.dir)
    # 80 prompts, 4 a step and 4 samples each: none comes again within 20 steps.
    assert Counter(s["prompt_id"] for s in samples) == Counter({s["prompt_id"]: 4 for s in samples})
    assert len(samples) == 7 * 4 * 4
    for sample in samples:
        step = sample["step"]
        assert all(0 <= step - 1 - version <= 2 for version in sample["weight_versions"]), sample


def test_R4_the_gate_stands_before_a_run_ahead_of_its_training_too(
    make_config: MakeConfig,
) -> None:
    """The samples of the first step are fresh: it compares them, and each step those that are."""
    cfg = make_config(run={"steps": 1}, cluster=APART, pipeline={"max_staleness": 1})
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
        pipeline={"max_staleness": 2},
        rollout={"mask_off_policy_tokens": True},
        algorithm={"correction": {"kind": "tis"}},
    )
    rows = run(cfg)
    assert max(row["rollout/staleness/max"] for row in rows) > 0
    assert [row["train/untrained_steps"] for row in rows] == [0] * 6
    sampled = [row["rollout/num_tokens"] for row in rows]
    assert all(row["train/num_tokens"] > n / 4 for row, n in zip(rows, sampled, strict=True))


@pytest.mark.parametrize(
    "sections",
    [
        {"cluster": APART, "rollout": {"oversample_prompts": 2}},
        {"pipeline": {"max_staleness": 2}},
    ],
    ids=["apart", "in a thread"],
)
def test_evaluations_adapters_and_a_reference(
    make_config: MakeConfig, sections: dict[str, Any]
) -> None:
    rows = run(
        make_config(
            model={"path": make_config().model.path, "lora": {"rank": 2}},
            algorithm={"correction": {"kind": "tis"}, "kl": {"coef": 0.05}},
            eval={"at_start": True, "every_n_steps": 1},
            **sections,
        )
    )
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all("eval/reward/mean" in row for row in rows)
    assert all("policy/ref_kl" in row for row in rows[1:])


def test_R19_a_thread_trains_every_prompt_once_within_the_bound_through_an_interruption(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the third update saves after it; the second launch resumes what was in flight."""
    cfg = make_config(run={"steps": 8}, eval={"every_n_steps": 3}, **AHEAD)
    update, num_updates = Trainer.update, 0

    def interrupted(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_updates
        num_updates += 1
        if num_updates == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return update(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "update", interrupted)
    outcome = reinforce.run(cfg)
    assert outcome == Outcome(3, stopped_by=signal.SIGINT)
    state = json.loads(
        (cfg.run.dir / "checkpoints" / f"step_{outcome.steps}" / "rollout.json").read_text()
    )
    assert state["groups"]
    rows = run(cfg)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert 0 < max(row["rollout/staleness/max"] for row in rows) <= 2
    found = trained(cfg.run.dir)
    assert Counter(s["prompt_id"] for s in found) == dict.fromkeys(
        {s["prompt_id"] for s in found}, 4
    )
    assert len(found) == 8 * 4 * 4


def test_an_error_in_the_thread_ends_the_run_with_its_cause(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = EmbeddedEngine.step
    num_steps = 0

    def fails(self: EmbeddedEngine) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 30:
            raise ZeroDivisionError("the sampler divides by zero")
        return step(self)

    monkeypatch.setattr(EmbeddedEngine, "step", fails)
    cfg = make_config(run={"steps": 50}, **AHEAD)
    with pytest.raises(WorkersLostError, match=r"thread of this process.*divides by zero"):
        reinforce.run(cfg)
    events = lines(cfg.run.dir / "events.jsonl")
    assert "divides by zero" in events[-1]["message"]


LEARNING: dict[str, dict[str, Any]] = {
    "beside": {},
    "carried over": {"rollout": {"oversample_prompts": 4}},
    "apart": {"cluster": APART},
    "ahead, paused": {"cluster": APART, "pipeline": {"max_staleness": 1}},
    "ahead, put back": {
        "cluster": APART,
        "pipeline": {
            "max_staleness": 2,
            "in_flight": "abort",
        },
    },
}


@pytest.mark.slow
def test_every_mode_learns_as_much(inputs: Path, tmp_path: Path) -> None:
    """In three seeds each; with threads for engines. Twice the rate loses the policy now and then
    in the last of 20 steps, whichever the mode."""
    rewards: dict[str, list[list[float]]] = {}
    for mode, sections in LEARNING.items():
        for seed in range(3):
            folder = tmp_path / f"{mode} {seed}"
            cfg = learning_config(inputs, folder, seed=seed, steps=28, lr=3e-3, **sections)
            rewards.setdefault(mode, []).append([row["reward/mean"] for row in run(cfg)])
    assert_all_learn_as_much(rewards)


@pytest.mark.parametrize("reward", [lambda step: 0.5, lambda step: 0.3 + 0.02 * step])
def test_planted_a_mode_that_learns_less_is_seen(reward: Callable[[int], float]) -> None:
    good, worse = [0.3 + 0.03 * step for step in range(20)], [reward(step) for step in range(20)]
    assert_all_learn_as_much({"good": [good], "as good": [good]})
    with pytest.raises(AssertionError):
        assert_all_learn_as_much({"good": [good] * 3, "worse": [worse] * 3})
