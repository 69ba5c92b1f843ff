"""PPO: whole runs with a critic, its gradient, its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.loops.conftest import MakeConfig
from tests.loops.test_processes import assert_same_run, run_hone
from tests.tiny_runs import learning_config, lines
from tests.trainer.examples import gradients, random_rows
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from hone.algorithms.ppo import ValueObjective
from hone.config.roles import critic_settings
from hone.config.tree import RLConfig
from hone.errors import UserError
from hone.loops import reinforce
from hone.models.load import load_value_model
from hone.models.settings import ModelConfig
from hone.models.tiny import make_tiny_model
from hone.trainer.settings import TrainerConfig
from hone.trainer.trainer import Trainer
from hone.types import Column, Group, Row

GAE = {"advantage": "gae", "lam": 0.9}
SHARED = {"prompts_per_minibatch": 2, "optimizer": {"lr": 3e-3}, "logits_chunk_tokens": 64}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_equal(a: Path, b: Path) -> None:
    one, other = weights(a), weights(b)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_R17_a_run_with_a_critic_resumes_bit_for_bit_and_writes_it(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    def cfg(name: str, steps: int) -> Any:
        return make_config(
            run={"dir": tmp_path / name, "steps": steps, "device": "cpu"},
            algorithm=GAE,
            trainer=SHARED,
            critic={"lr": 1e-3},
        )

    reinforce.run(cfg("straight", 3))
    for steps in (1, 3):
        reinforce.run(cfg("resumed", steps))
    for model in ("model", "critic"):
        assert_equal(tmp_path / "straight" / model, tmp_path / "resumed" / model)
    rows = lines(tmp_path / "straight" / "metrics.jsonl")
    assert all(row["critic/num_optimizer_steps"] == 2 for row in rows)
    assert all(row["critic/lr"] == 1e-3 and row["train/lr"] == 3e-3 for row in rows)
    assert all(-10 < row["critic/vf_explained_var"] <= 1 for row in rows)
    loaded, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "straight" / "critic", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert loaded.config.num_labels == 1
    assert loaded.score.weight.abs().sum() > 0


def test_a_critic_goes_on_from_one_that_was_written(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    one = {"run": {"dir": tmp_path / "one", "steps": 1, "device": "cpu"}, "algorithm": GAE}
    reinforce.run(make_config(**one))
    cfg = ModelConfig(path=str(tmp_path / "one" / "critic"))
    model = load_value_model(cfg, device="cpu", seed=0)
    stored = weights(tmp_path / "one" / "critic")
    assert all(torch.equal(p, stored[name]) for name, p in model.named_parameters())
    two = one | {"run": {"dir": tmp_path / "two", "steps": 1, "device": "cpu"}}
    reinforce.run(make_config(**two, critic={"path": str(tmp_path / "one" / "critic")}))
    (row,) = lines(tmp_path / "two" / "metrics.jsonl")
    assert row["critic/values/std"] > 0, "a fresh head gives zeros"


def test_a_critic_has_an_optimizer_of_its_own(make_config: MakeConfig, tmp_path: Path) -> None:
    """Muon for its hidden matrices; the policy learns as ever."""
    for name in ("adamw", "muon"):
        cfg = make_config(
            run={"dir": tmp_path / name, "steps": 2, "device": "cpu"},  # a head of 0 at first
            algorithm=GAE,
            critic={"optimizer": name, "lr": 1e-3},
            trainer={"optimizer": {"lr": 1e-3, "muon_lr": 1e-3}},
        )
        reinforce.run(cfg)
    assert_equal(tmp_path / "adamw" / "model", tmp_path / "muon" / "model")
    adamw, muon = (weights(tmp_path / name / "critic") for name in ("adamw", "muon"))
    assert torch.equal(adamw["score.weight"], muon["score.weight"]), "a vector"
    differing = [name for name in adamw if not torch.equal(adamw[name], muon[name])]
    assert differing == [name for name in adamw if "proj" in name]


@pytest.mark.parametrize("own", [{"recompute": "full"}, {"offload": "gradients"}])
def test_a_critic_that_keeps_less_on_its_device_learns_the_same(
    make_config: MakeConfig, tmp_path: Path, own: dict[str, Any]
) -> None:
    def cfg(name: str, **critic: Any) -> RLConfig:
        return make_config(
            run={"dir": tmp_path / name, "steps": 2, "device": "cpu"},
            algorithm=GAE,
            trainer=SHARED,
            critic={"lr": 1e-3, **critic},
        )

    thrifty = cfg("thrifty", **own)
    plain = critic_settings(cfg("plain"))
    assert critic_settings(thrifty) == plain.model_copy(update=own)
    assert thrifty.trainer == cfg("plain").trainer
    for each in (cfg("plain"), thrifty):
        reinforce.run(each)
    for model in ("model", "critic"):
        assert_equal(tmp_path / "plain" / model, tmp_path / "thrifty" / model)


def test_a_classifier_of_several_labels_is_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "lm", vocab_size=48, hidden_size=32, num_layers=2, seed=0)
    config = AutoConfig.from_pretrained(tmp_path / "lm", num_labels=3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "three")
    with pytest.raises(UserError, match="is a classifier of 3 classes"):
        load_value_model(ModelConfig(path=str(tmp_path / "three")), device="cpu", seed=0)


def test_the_critic_learns_alone_at_first(make_config: MakeConfig, tmp_path: Path) -> None:
    cfg = make_config(
        run={"dir": tmp_path / "run", "steps": 3, "device": "cpu"},
        algorithm=GAE,
        critic={"warmup_steps": 2},
    )
    reinforce.run(cfg)
    rows = lines(tmp_path / "run" / "metrics.jsonl")
    assert ["train/loss" in row for row in rows] == [False, False, True]
    assert all(row["critic/loss"] > 0 for row in rows)
    assert rows[-1]["off_policy/mismatch_kl"] < 1e-9
    again = cfg.model_copy(
        update={
            "critic": cfg.critic.model_copy(update={"warmup_steps": 1}),
            "run": cfg.run.model_copy(update={"dir": tmp_path / "one", "steps": 1}),
        }
    )
    reinforce.run(again)
    assert_equal(tmp_path / "one" / "model", Path(cfg.model.path))


def test_a_checkpoint_without_a_critic_is_refused(make_config: MakeConfig) -> None:
    reinforce.run(make_config(run={"dir": make_config().run.dir, "steps": 1, "device": "cpu"}))
    with pytest.raises(UserError, match=r"gae needs a critic, and the checkpoint is of a run wi"):
        reinforce.run(make_config(algorithm=GAE))


@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_a_critic_that_sleeps_leaves_the_device_and_learns_the_same(
    make_config: MakeConfig, tmp_path: Path, offload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, whose masters are apart from the weights."""
    collect, seen = reinforce.RLRun.collect, dict[str, list[int]]()

    def watched(run: reinforce.RLRun, step: int) -> list[Group]:
        weights = run.models.learners["critic"].policy.parameters.values()
        there = sum(weight.untyped_storage().nbytes() for weight in weights)
        seen.setdefault(run.launch.dir.name, []).append(there)
        return collect(run, step)

    monkeypatch.setattr(reinforce.RLRun, "collect", watched)
    for name, option in {"awake": {}, "asleep": {"enable_sleep": True, "offload": offload}}.items():
        reinforce.run(
            make_config(
                run={"dir": tmp_path / name, "steps": 2, "device": "cpu"},
                model={"path": make_config().model.path, "dtype": "bfloat16", "init": "random"},
                algorithm=GAE,
                trainer=SHARED | option,
                critic={"lr": 1e-3},
            )
        )
    if offload == "none":  # else a CPU holds the weights for their checksums too
        assert seen["asleep"] == [0, 0] < seen["awake"]
    for model in ("model", "critic"):
        assert_equal(tmp_path / "awake" / model, tmp_path / "asleep" / model)


@pytest.mark.slow
def test_R24_two_processes_with_a_critic_are_one_run(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Then on in one process, and once more in two from a critic that two have written."""
    sections: dict[str, Any] = {"algorithm": GAE, "trainer": SHARED, "critic": {"lr": 1e-3}}
    one = make_config(run={"dir": tmp_path / "one"}, **sections)
    reinforce.run(one)
    two = make_config(run={"dir": tmp_path / "two", "steps": 2}, **sections)
    run_hone("rl", two, tmp_path, "--nproc", "2", "--trainer.parallel.zero_stage=3")
    reinforce.run(make_config(run={"dir": tmp_path / "two"}, **sections))
    assert_same_run(one.run.dir, two.run.dir)
    critics = [weights(cfg.run.dir / "critic") for cfg in (one, two)]
    assert critics[0].keys() == critics[1].keys()
    for name, tensor in critics[0].items():
        assert float((tensor - critics[1][name]).abs().max()) < 1e-5, name
    sections["critic"]["path"] = str(tmp_path / "two" / "critic")
    three = make_config(run={"dir": tmp_path / "three", "steps": 1}, **sections)
    run_hone("rl", three, tmp_path, "--nproc", "2")
    assert lines(three.run.dir / "metrics.jsonl")[0]["critic/values/std"] > 0


def value_model(folder: Path) -> PreTrainedModel:
    make_tiny_model(folder, vocab_size=48, hidden_size=32, num_layers=2, seed=0)
    model = load_value_model(ModelConfig(path=str(folder), init="random"), device="cpu", seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.score.weight.normal_(std=0.3, generator=generator)
    return model


def critic_rows() -> list[Row]:
    rows, generator = random_rows(12, seed=4), torch.Generator().manual_seed(2)
    for row in rows:
        row.columns = {
            name: Column(torch.randn(row.num_trained, generator=generator))
            for name in ("returns", "values/critic")
        }
    return rows


@pytest.mark.parametrize(
    "cut", [{"micro_batch_size": 1}, {"micro_batch_size": 5}, {"max_tokens_per_microbatch": 60}, {}]
)
def test_R1_the_gradient_of_a_critic_is_that_of_the_set(
    cut: dict[str, Any], tmp_path: Path
) -> None:
    """In float64, a row at a time through transformers' own attention. The value of a token is that
    of the state before it."""
    model, rows = value_model(tmp_path / "model"), critic_rows()
    config = model.config
    twin = AutoModelForSequenceClassification.from_config(
        config, dtype=torch.float64, attn_implementation="eager"
    )
    twin.load_state_dict(model.state_dict())
    twin = twin.double().eval()
    trainer = Trainer(
        model, TrainerConfig.model_validate(cut), ValueObjective(0.5), total_steps=9, role="critic"
    )
    losses: list[torch.Tensor] = []
    scored = trainer.begin(rows, frozenset({"values"}))()
    for row, own in zip(rows, scored, strict=True):
        hidden = twin.base_model(torch.tensor([row.token_ids])).last_hidden_state[0]
        trained = [t - 1 for t, is_trained in enumerate(row.loss_mask) if is_trained]
        values = twin.score(hidden[trained]).squeeze(-1)
        torch.testing.assert_close(own["values"].double(), values.detach(), atol=1e-5, rtol=1e-4)
        returns, old = (row.column(name).double() for name in ("returns", "values/critic"))
        near = old + (values - old).clamp(-0.5, 0.5)
        losses.append(0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2))
    expected = torch.cat(losses).mean()
    expected.backward()
    loss, _ = trainer.forward_backward(rows)
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
    wanted = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    got = gradients(trainer)
    assert got.keys() == wanted.keys()
    largest = max(float(g.abs().max()) for g in wanted.values())
    for name, want in wanted.items():
        assert float((got[name] - want).abs().max()) / largest < 1e-5, name


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_reward_rises_as_it_does_with_groups(inputs: Path, tmp_path: Path, seed: int) -> None:
    levels = {}
    for advantage in ("gae", "grpo"):
        cfg = learning_config(
            inputs, tmp_path / advantage, seed=seed, algorithm={"advantage": advantage},
            critic={"lr": 6e-3},
        )  # fmt: skip
        reinforce.run(cfg)
        rewards = [row["reward/mean"] for row in lines(tmp_path / advantage / "metrics.jsonl")]
        levels[advantage] = sum(rewards[-4:]) / 4
        assert levels[advantage] > sum(rewards[:4]) / 4 + 0.15, rewards
    assert levels["gae"] > levels["grpo"] - 0.12, levels
