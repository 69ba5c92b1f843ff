"""Runs of `hone dpo`: whole, resumed, with adapters, by two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.loops.test_processes import assert_same_run, run_hone

from hone.config.tree import DPOConfig
from hone.data.arithmetic import generate, right_and_backwards, write_jsonl
from hone.loops import supervised


@pytest.fixture
def make_dpo(inputs: Path, tmp_path: Path) -> Any:
    pairs = tmp_path / "pairs.jsonl"
    write_jsonl(pairs, right_and_backwards(generate(80, seed=0, low=0, high=99)))

    def make(name: str, **sections: Any) -> DPOConfig:
        fields: dict[str, Any] = {
            "run": {"dir": tmp_path / name, "steps": 4, "device": "cpu"},
            "model": {"path": str(inputs / "model")},
            "data": {
                "train": [{"path": str(pairs)}],
                "eval_fraction": 0.25,
                "chat": "never",
                "max_tokens": 16,
                "examples_per_step": 7,
            },
            "trainer": {"optimizer": {"lr": 3e-3}, "logits_chunk_tokens": 64},
            "eval": {"every_n_steps": 2},
            "checkpoint": {"every_n_steps": 2},
            "log": {"to": []},
        }
        for section, values in sections.items():
            fields[section] = fields.get(section, {}) | values
        return DPOConfig.model_validate(fields)

    return make


def metrics(cfg: DPOConfig) -> list[dict[str, float]]:
    text = (cfg.run.dir / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(
    "loss", ["sigmoid", "kto", "orpo", {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}]
)
def test_preferences_are_learnt(loss: Any, make_dpo: Any) -> None:
    cfg = make_dpo("run", algorithm={"loss": loss}, run={"steps": 12}, eval={"every_n_steps": 12})
    supervised.run(cfg)
    rows = metrics(cfg)
    if loss == "kto":
        assert rows[-1]["rewards/chosen"] > rows[-1]["rewards/rejected"]
        assert "kl" in rows[0]
    else:
        assert rows[-1]["rewards/margins"] > rows[0]["rewards/margins"]
        assert rows[-1]["eval/rewards/accuracies"] > 0.5
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]


def test_a_resumed_run_is_the_same_bit_by_bit(make_dpo: Any) -> None:
    whole, parted = make_dpo("whole"), make_dpo("parted", run={"steps": 2})
    supervised.run(whole)
    supervised.run(parted)
    supervised.run(make_dpo("parted"))
    one, two = (load_file(cfg.run.dir / "model" / "model.safetensors") for cfg in (whole, parted))
    assert all(tensor.equal(two[name]) for name, tensor in one.items())


def test_without_adapters_is_the_reference_of_a_run_that_trains_them(make_dpo: Any) -> None:
    cfg = make_dpo("lora", model={"lora": {"rank": 4}})
    supervised.run(cfg)
    rows = metrics(cfg)
    assert rows[0]["rewards/margins"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["rewards/margins"] > 0


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_R24_two_processes_train_the_same(loss: str, make_dpo: Any, tmp_path: Path) -> None:
    one, two = (make_dpo(name, algorithm={"loss": loss}) for name in ("one", "two"))
    supervised.run(one)
    run_hone("dpo", two, tmp_path, "--nproc", "2", "--trainer.parallel.zero_stage", "3")
    for cfg in (one, two):
        (cfg.run.dir / "samples.jsonl").write_text("")
    assert_same_run(one.run.dir, two.run.dir)
