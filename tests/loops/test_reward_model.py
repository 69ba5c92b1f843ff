"""Runs of `hone reward-model`: what they save, resumed, with adapters, by two processes, and as the
start of a critic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.loops.conftest import MakeConfig
from tests.loops.test_processes import assert_same_run, run_hone
from tests.tiny_runs import lines, right_and_backwards
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hone.config.tree import RewardModelingConfig
from hone.data.arithmetic import write_jsonl
from hone.data.pairs import load_pairs
from hone.errors import UserError
from hone.loops import reinforce, supervised
from hone.models.load import load_value_model
from hone.models.settings import ModelConfig
from hone.models.tokenizer import load_tokenizer


@pytest.fixture
def make(inputs: Path, tmp_path: Path) -> Any:
    pairs = [pair | {"margin": 0.1} for pair in right_and_backwards()]
    write_jsonl(tmp_path / "pairs.jsonl", pairs)

    def make(name: str, **sections: Any) -> RewardModelingConfig:
        fields: dict[str, Any] = {
            "run": {"dir": tmp_path / name, "steps": 4, "device": "cpu"},
            "model": {"path": str(inputs / "model")},
            "data": {
                "train": [{"path": str(tmp_path / "pairs.jsonl")}],
                "eval_fraction": 0.25,
                "chat": "never",
                "max_tokens": 16,
                "examples_per_step": 7,
            },
            "algorithm": {"center_coef": 0.01},
            "trainer": {"optimizer": {"lr": 3e-3}, "max_tokens_per_microbatch": 60},
            "eval": {"every_n_steps": 2},
            "checkpoint": {"every_n_steps": 2},
            "log": {"to": []},
        }
        for section, values in sections.items():
            fields[section] = fields.get(section, {}) | values
        return RewardModelingConfig.model_validate(fields)

    return make


def weights(cfg: RewardModelingConfig) -> dict[str, torch.Tensor]:
    return load_file(cfg.run.dir / "model" / "model.safetensors")


def scores_by_transformers(cfg: RewardModelingConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the held-out pairs, by the folder that the run has written, padded by its tokenizer."""
    folder = cfg.run.dir / "model"
    model, info = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.pad_token_id == tokenizer.pad_token_id is not None
    held_out = load_pairs(
        cfg.data, load_tokenizer(cfg.model), seed=cfg.run.seed, for_reward_model=True
    )
    rows = [row.token_ids for item in held_out.eval for row in item.rows]
    batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    with torch.no_grad():
        scores = model(**batch).logits.squeeze(-1)
    return scores[0::2], scores[1::2]


def assert_evaluated_as_transformers_does(cfg: RewardModelingConfig) -> None:
    chosen, rejected = scores_by_transformers(cfg)
    last = lines(cfg.run.dir / "metrics.jsonl")[-1]
    both = torch.cat([chosen, rejected])
    assert last["eval/accuracy"] == pytest.approx(float((chosen > rejected).float().mean()))
    for name, value in {
        "eval/min_reward": both.min(),
        "eval/mean_reward": both.mean(),
        "eval/max_reward": both.max(),
        "eval/margin": (chosen - rejected).mean(),
        "eval/loss": -torch.nn.functional.logsigmoid(chosen - rejected - 0.1).mean()
        + 0.01 * ((chosen + rejected) ** 2).mean(),
    }.items():
        assert last[name] == pytest.approx(float(value), abs=1e-5), name


def test_what_is_saved_gives_transformers_the_same_number(make: Any) -> None:
    cfg = make("run", run={"steps": 30})
    supervised.run(cfg)
    rows = lines(cfg.run.dir / "metrics.jsonl")
    assert rows[0]["accuracy"] == rows[0]["mean_reward"] == 0, "a fresh head gives zeros"
    assert sum(row["accuracy"] for row in rows[-10:]) / 10 > 0.65
    assert weights(cfg)["score.weight"].shape == (1, 32)
    assert_evaluated_as_transformers_does(cfg)


def test_a_tokenizer_without_padding_pads_with_its_end(
    make: Any, inputs: Path, tmp_path: Path
) -> None:
    """What is saved is then read before the end token, and so is it trained."""
    folder = tmp_path / "unpadded"
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    cfg = make("run", model={"path": str(inputs / "model"), "tokenizer": str(folder)})
    supervised.run(cfg)
    document = json.loads((cfg.run.dir / "model" / "config.json").read_text())
    assert document["pad_token_id"] == tokenizer.eos_token_id
    assert_evaluated_as_transformers_does(cfg)


def test_padding_that_the_model_lacks_is_refused(make: Any, inputs: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(tmp_path / "more")
    cfg = make("run", model={"path": str(inputs / "model"), "tokenizer": str(tmp_path / "more")})
    with pytest.raises(UserError, match=r"padding is token \d+, and .* Set pad_token"):
        supervised.run(cfg)


def test_R17_a_resumed_run_is_the_same_bit_by_bit(make: Any) -> None:
    whole, parted = make("whole"), make("parted", run={"steps": 2})
    supervised.run(whole)
    supervised.run(parted)
    supervised.run(make("parted"))
    one, two = weights(whole), weights(parted)
    assert all(tensor.equal(two[name]) for name, tensor in one.items())


def test_a_reward_model_is_trained_on(make: Any) -> None:
    """With its head."""
    first = make("first")
    supervised.run(first)
    second = make("second", model={"path": str(first.run.dir / "model")}, eval={"at_start": True})
    supervised.run(second)
    before, after = (lines(cfg.run.dir / "metrics.jsonl") for cfg in (first, second))
    assert after[0]["step"] == 0
    assert after[0]["eval/margin"] == pytest.approx(before[-1]["eval/margin"], abs=1e-5)


@pytest.mark.parametrize("load_in_4bit", [False, True])
def test_adapters_and_the_head_are_trained(make: Any, load_in_4bit: bool) -> None:
    cfg = make("lora", model={"lora": {"rank": 4, "load_in_4bit": load_in_4bit}}, run={"steps": 8})
    supervised.run(cfg)
    assert weights(cfg)["score.weight"].abs().sum() > 0
    assert_evaluated_as_transformers_does(cfg)
    adapter = load_file(cfg.run.dir / "adapter" / "adapter_model.safetensors")
    assert adapter["base_model.model.score.weight"].equal(weights(cfg)["score.weight"])
    document = json.loads((cfg.run.dir / "adapter" / "adapter_config.json").read_text())
    assert (document["task_type"], document["modules_to_save"]) == ("SEQ_CLS", ["score"])


def test_a_critic_starts_from_a_reward_model(
    make: Any, make_config: MakeConfig, tmp_path: Path
) -> None:
    scorer = make("scorer")
    supervised.run(scorer)
    path = scorer.run.dir / "model"
    loaded = load_value_model(ModelConfig(path=str(path)), device="cpu", seed=0)
    assert all(p.equal(weights(scorer)[name]) for name, p in loaded.named_parameters())
    cfg = make_config(
        run={"dir": tmp_path / "ppo", "steps": 1, "device": "cpu"},
        algorithm={"advantage": "gae"},
        critic={"path": str(path)},
    )
    reinforce.run(cfg)
    (row,) = lines(cfg.run.dir / "metrics.jsonl")
    assert row["critic/values/std"] > 0, "a fresh head gives zeros"


@pytest.mark.slow
def test_R24_two_processes_train_the_same(make: Any, tmp_path: Path) -> None:
    """From a head that has learnt: behind one of zeros gradients are so small that AdamW makes the
    last bits of their sums large."""
    first = make("first")
    supervised.run(first)
    one, two = (make(name, model={"path": str(first.run.dir / "model")}) for name in ("one", "two"))
    supervised.run(one)
    run_hone("reward-model", two, tmp_path, "--nproc", "2", "--trainer.parallel.zero_stage", "3")
    for cfg in (one, two):
        (cfg.run.dir / "samples.jsonl").write_text("")
    assert_same_run(one.run.dir, two.run.dir)
    assert_evaluated_as_transformers_does(two)
