"""A reward model: whole runs in which it scores, alone, beside functions and in several modes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.loops.conftest import MakeConfig
from tests.loops.test_processes import assert_same_run, run_hone
from tests.tiny_runs import lines, make_classifier, write_inputs
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hone.cli.main import main
from hone.config.tree import EvaluateConfig
from hone.errors import UserError
from hone.loops import reinforce
from hone.loops.evaluation import run_evaluation
from hone.rewards.scorer import FailureRateError

GAME = """
class Game:
    def start(self, row):
        self.num_turns = 0

    def step(self, action):
        self.num_turns += 1
        return "+1=" if self.num_turns == 1 and len(action.text) % 2 else None
"""


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_classifier(tmp_path_factory.mktemp("judge")))


def expected_score(judge: str, prompt: str, completion: str, *, ends: bool) -> float:
    """By transformers alone."""
    model = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(judge)
    text = prompt + completion + (tokenizer.eos_token if ends else "")
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.no_grad():
        return float(model(ids).logits[0, 0])


def assert_scored(rows: list[dict[str, Any]], judge: str) -> None:
    """Each row of samples, at its score: where it was cut the end token is missing."""
    assert rows
    for row in rows:
        last = (row.get("turns") or [row])[-1]  # an episode without room for a turn ends whole
        ends = last["stop_reason"] != "length"
        score = row["reward_parts"]["reward_model"]
        assert score == pytest.approx(
            expected_score(judge, row["prompt"], row["text"], ends=ends), abs=1e-5
        )


def test_the_reward_of_a_run_is_the_score_of_the_model(make_config: MakeConfig, judge: str) -> None:
    cfg = make_config(
        run={"steps": 2},
        reward={"functions": [], "model": {"path": judge, "max_tokens_per_forward": 64}},
        eval={"every_n_steps": 2, "max_completion_tokens": 8},
        log={"samples_per_step": 99},
    )
    reinforce.run(cfg)
    samples = lines(cfg.run.dir / "samples.jsonl")
    assert {row["stop_reason"] for row in samples} > {"length"}
    assert_scored(samples[:12], judge)
    metrics = lines(cfg.run.dir / "metrics.jsonl")
    evaluated = [each for each in samples if each["id"].startswith("eval-")]
    for row in metrics:
        of_step = [each for each in samples if each["step"] == row["step"]]
        scores = [each["reward"] for each in of_step if each not in evaluated]
        assert len(scores) == 16
        assert row["reward/mean"] == row["reward/reward_model/mean"]
        assert row["reward/mean"] == pytest.approx(sum(scores) / len(scores))
        assert 0 < row["time/generate/reward_model_s"] < row["time/generate_s"]
    assert_scored(evaluated[:4], judge)
    scores = [each["reward"] for each in evaluated]
    assert metrics[-1]["eval/reward/reward_model/mean"] == pytest.approx(sum(scores) / len(scores))


def test_functions_are_measured_beside_it(make_config: MakeConfig, judge: str) -> None:
    """One of weight 0 changes nothing."""
    reward = {"functions": [{"fn": "exact_match", "weight": 0}], "model": {"path": judge}}
    cfg = make_config(run={"steps": 1}, reward=reward)
    reinforce.run(cfg)
    (row,) = lines(cfg.run.dir / "metrics.jsonl")
    assert row["reward/mean"] == pytest.approx(row["reward/reward_model/mean"])
    assert row["reward/exact_match/mean"] != row["reward/mean"]


@pytest.mark.parametrize(
    "sections",
    [
        {"pipeline": {"max_staleness": 1}, "algorithm": {"correction": {"kind": "tis"}}},
        {"rollout": {"oversample_prompts": 2, "dynamic_sampling": True}},
        {"engine": {"enable_sleep": True}, "trainer": {"enable_sleep": True}},
    ],
    ids=["ahead of training", "partial", "asleep in turns"],
)
def test_samples_of_every_mode_are_scored(
    sections: dict[str, Any], make_config: MakeConfig, judge: str
) -> None:
    reward = {"functions": [], "model": {"path": judge, "max_tokens_per_forward": 64}}
    cfg = make_config(reward=reward, log={"samples_per_step": 99}, **sections)
    reinforce.run(cfg)
    samples = lines(cfg.run.dir / "samples.jsonl")
    assert len(samples) == 48
    assert_scored(samples[::4], judge)


@pytest.mark.slow
def test_R24_two_processes_are_one_run(make_config: MakeConfig, tmp_path: Path, judge: str) -> None:
    """Each scores its own samples, in other passes. Or all share the model: with an engine each, of
    which one has fewer samples to score, or with one engine, whose second rank has none; also where
    a run is resumed, and where frozen models sleep."""
    sections: dict[str, Any] = {
        "reward": {"functions": [], "model": {"path": judge}},
        "algorithm": {"kl": {"coef": 0.1}},
        "rollout": {"prompts_per_step": 3},
        "eval": {"every_n_steps": 1, "max_completion_tokens": 8},
        "checkpoint": {"every_n_steps": 1},
        "log": {"samples_per_step": 99},
    }
    trainer: dict[str, Any] = {"optimizer": {"lr": 3e-3, "eps": 1e-5}}
    shards = ["--trainer.parallel.zero_stage", "3"]
    asleep = ["--trainer.enable_sleep", "true", "--engine.enable_sleep", "true"]
    write_inputs(tmp_path, num_kv_heads=2)
    sections["model"] = {"path": str(tmp_path / "model")}
    one = make_config(run={"dir": tmp_path / "one"}, trainer=trainer, **sections)
    reinforce.run(one)
    for name, launches in {
        "whole": [[]],
        "shards": [shards],
        "one engine, asleep, resumed": [
            [*shards, *asleep, "--engine.tensor_parallel_size", "2", "--run.steps", "2"],
            [*shards, *asleep, "--engine.tensor_parallel_size", "2"],
        ],
    }.items():
        two = make_config(run={"dir": tmp_path / name}, trainer=trainer, **sections)
        for more in launches:
            run_hone("rl", two, tmp_path, "--nproc", "2", *more)
        assert_same_run(one.run.dir, two.run.dir)


@pytest.mark.slow
def test_processes_that_share_it_carry_samples_over_and_drop_groups(
    make_config: MakeConfig, tmp_path: Path, judge: str
) -> None:
    """With functions, which are slower or quicker than the model, and episodes of two turns, which
    their environment ends."""
    (tmp_path / "game.py").write_text(GAME)
    cfg = make_config(
        env={"path": f"{tmp_path / 'game.py'}:Game", "max_turns": 2},
        reward={
            "functions": [{"fn": "exact_match", "weight": 0}],
            "model": {"path": judge, "max_tokens_per_forward": 64},
        },
        rollout={
            "oversample_prompts": 3,
            "dynamic_sampling": True,
            "max_completion_tokens": 20,
        },
        trainer={"parallel": {"zero_stage": 3}},
        log={"samples_per_step": 99},
    )
    run_hone("rl", cfg, tmp_path, "--nproc", "2")
    samples = lines(cfg.run.dir / "samples.jsonl")
    assert len(samples) == 48
    assert {len(row["turns"]) for row in samples} == {1, 2}
    assert_scored(samples[::4], judge)
    (*_, last) = lines(cfg.run.dir / "metrics.jsonl")
    assert last["time/generate/reward_model_s"] > 0


def test_an_evaluation_and_the_best_of_several_by_it(
    inputs: Path, tmp_path: Path, judge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = EvaluateConfig.model_validate(
        {
            "run": {"dir": tmp_path / "eval", "device": "cpu"},
            "model": {"path": str(inputs / "model")},
            "data": {
                "eval": [{"path": str(inputs / "eval.jsonl"), "max_rows": 4}],
                "chat": "never",
            },
            "reward": {"model": {"path": judge}},
            "eval": {"max_completion_tokens": 8},
        }
    )
    found = run_evaluation(cfg)
    rows = lines(tmp_path / "eval" / "eval_samples.jsonl")
    assert_scored(rows, judge)
    mean = sum(row["reward"] for row in rows) / len(rows)
    assert found["eval/reward/reward_model/mean"] == pytest.approx(mean)
    assert found["eval/reward/mean"] == pytest.approx(mean), "no function beside it"

    monkeypatch.chdir(tmp_path)
    flags = [f"--model.path={inputs / 'model'}", "--run.device=cpu", "--data.chat=never"]
    flags += [f"--data.train.0.path={inputs / 'train.jsonl'}", "--data.train.0.max_rows=5"]
    flags += ["--n_samples_per_prompt=4", "--generation.max_completion_tokens=8"]
    flags += [f"--reward.model.path={judge}"]
    for keep in ("all", "best"):
        assert main(["generate", *flags, f"--keep={keep}", f"--output={keep}.jsonl"]) == 0
    groups: dict[str, list[float]] = {}
    for row in lines(tmp_path / "all.jsonl"):
        groups.setdefault(row["prompt_id"], []).append(row["reward"])
    assert [len(group) for group in groups.values()] == [4] * 5
    best = lines(tmp_path / "best.jsonl")
    assert [row["reward"] for row in best] == pytest.approx([max(x) for x in groups.values()])


def test_what_gives_no_score_is_refused_before_anything_is_sampled(
    make_config: MakeConfig, inputs: Path
) -> None:
    cfg = make_config(reward={"functions": [], "model": {"path": str(inputs / "model")}})
    with pytest.raises(UserError, match="which gives no score; name a model"):
        reinforce.run(cfg)
    assert not (cfg.run.dir / "metrics.jsonl").exists()


def test_too_many_without_a_score_end_the_run(make_config: MakeConfig, tmp_path: Path) -> None:
    """Of a model that is made for fewer tokens than samples have."""
    path = make_classifier(tmp_path / "judge", context=8)
    cfg = make_config(reward={"functions": [], "model": {"path": str(path)}})
    with pytest.raises(FailureRateError, match=r"\d+ tokens, more than its context of 8"):
        reinforce.run(cfg)
