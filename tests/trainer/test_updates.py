"""Mini-batches, epochs, old log-probabilities and resuming."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from hone.algorithms.settings import AlgorithmConfig
from hone.algorithms.sft import SFT, CrossEntropy
from hone.loops.supervised import evaluate
from hone.models.adapters import adapt
from hone.models.decoder import decoder_layers
from hone.models.settings import LoraConfig
from hone.observe.metrics import to_scalars
from hone.trainer.frozen import FrozenScorer, WithoutAdapters
from hone.trainer.models import Models
from hone.trainer.settings import SFTTrainerConfig, TrainerConfig
from hone.trainer.trainer import Trainer
from hone.types import Column, Row
from tests.tables import table
from tests.trainer.examples import gradients, logprobs_of, make_trainer, random_rows, tiny_model


def schedule(trainer: Trainer, rows: list[Row]) -> list[str]:
    return [
        " ".join(dict.fromkeys(row.group_id for row in minibatch))
        for minibatch in trainer.batcher.optimizer_steps(rows, trainer.num_updates)
    ]


GOLDEN = (
    ["g3 g0", "g1 g2", "g4", "g1 g4", "g3 g2", "g0"],
    ["g3 g2", "g1 g0", "g4", "g4 g2", "g1 g0", "g3"],
)


def test_golden_schedule_of_minibatches_and_epochs():
    rows = random_rows(20)
    trainer = make_trainer(tiny_model(), prompts_per_minibatch=2, num_epochs=2)
    assert schedule(trainer, rows) == GOLDEN[0]
    trainer.num_updates = 1
    assert schedule(trainer, rows) == GOLDEN[1]


def test_minibatches_hold_whole_groups_and_each_row_once_an_epoch():
    rows = random_rows(22)
    trainer = make_trainer(tiny_model(), prompts_per_minibatch=2, num_epochs=3)
    minibatches = trainer.batcher.optimizer_steps(rows, 0)
    assert [len({row.group_id for row in m}) for m in minibatches] == [2, 2, 2] * 3
    for epoch in range(3):
        seen = [row.id for m in minibatches[3 * epoch : 3 * epoch + 3] for row in m]
        assert sorted(seen) == sorted(row.id for row in rows)
    assert len(make_trainer(tiny_model()).batcher.optimizer_steps(rows, 0)) == 1


def on_policy_rows(num_rows: int) -> list[Row]:
    rows = random_rows(num_rows)
    for row in rows:
        del row.columns["logprobs/policy"]
        del row.columns["logprobs/reference"]
    return rows


def test_a_single_step_takes_its_own_logprobs_as_the_old_ones():
    metrics = to_scalars(make_trainer(tiny_model()).update(on_policy_rows(16)))
    assert metrics["policy/ratio/mean"] == 1.0
    assert metrics["policy/approx_kl"] == 0.0
    assert metrics["train/num_optimizer_steps"] == 1


@pytest.mark.parametrize(
    "steps", [{"prompts_per_minibatch": 2}, {"num_epochs": 2}], ids=["mini-batches", "epochs"]
)
def test_several_steps_remember_the_policy_before_the_first(steps: dict[str, int]):
    """`Models` scores it then, since an update refuses rows that do not say so."""
    settings: dict[str, Any] = {**steps, "optimizer": {"lr": 0.01}}
    rows, given = on_policy_rows(16), on_policy_rows(16)
    trainer = make_trainer(tiny_model(), **settings)
    with pytest.raises(ValueError, match="'r0' has no logprobs/policy"):
        trainer.update(rows)
    for row, logprobs in zip(given, trainer.logprobs(given), strict=True):
        row.columns["logprobs/policy"] = Column(logprobs)
    rows, _ = Models({"policy": trainer}).prepare(SFT(), rows, version=0)
    metrics = to_scalars(trainer.update(rows))
    assert metrics["train/num_optimizer_steps"] == 2
    assert metrics["policy/approx_kl"] > 0

    other = make_trainer(tiny_model(), **settings)
    other.update(given)
    for (name, a), (_, b) in zip(trainer.named_weights(), other.named_weights(), strict=True):
        assert torch.equal(a, b), name


def test_updates_raise_the_probability_of_what_was_good():
    trainer = make_trainer(tiny_model(), optimizer={"lr": 0.003})
    rows = on_policy_rows(8)
    for i, row in enumerate(rows):
        row.columns["advantages"] = Column(torch.full((row.num_trained,), 1.0 if i % 2 else -1.0))
        del row.columns["logprobs/engine"]
    before = trainer.logprobs(rows)
    for _ in range(3):
        trainer.update(rows)
    moved = [float((a - b).mean()) for a, b in zip(trainer.logprobs(rows), before, strict=True)]
    assert min(moved[1::2]) > 0 > max(moved[0::2])


def test_metrics_equal_a_recount_over_all_tokens():
    rows = random_rows(16, seed=3)
    cfg = AlgorithmConfig(clip_high=0.1)
    results = [
        to_scalars(make_trainer(tiny_model(), cfg, micro_batch_size=size).update(rows))
        for size in (3, 16)
    ]
    trainer = make_trainer(tiny_model(), cfg)
    current = torch.cat(trainer.logprobs(rows))
    old, engine = (
        torch.cat([row.column(name) for row in rows])
        for name in ("logprobs/policy", "logprobs/engine")
    )
    log_ratio = current.double() - old.double()
    gap = (old.double() - engine.double()).exp()
    for metrics in results:
        assert metrics["policy/ratio/mean"] == pytest.approx(
            float(log_ratio.exp().mean()), rel=1e-5
        )
        assert metrics["off_policy/ratio/p95"] == pytest.approx(float(gap.quantile(0.95)), rel=1e-5)
        assert metrics["train/num_tokens"] == len(current)
        for name in ("policy/entropy", "policy/clip_fraction", "train/share_with_gradient"):
            assert metrics[name] == pytest.approx(results[0][name], rel=1e-5)
    assert [m["train/num_micro_batches"] for m in results] == [6, 1]


def test_only_fresh_tokens_tell_how_well_engine_and_trainer_agree():
    rows = random_rows(8, seed=5)
    for row in rows:
        row.columns["staleness"] = Column(torch.arange(row.num_trained) % 3)
    metrics = to_scalars(make_trainer(tiny_model()).update(rows))
    gap = torch.cat(
        [
            row.column("logprobs/policy").double() - row.column("logprobs/engine").double()
            for row in rows
        ]
    )
    fresh = torch.cat([row.column("staleness") for row in rows]) == 0
    for name, expected in (
        ("off_policy/mismatch_kl", (gap.exp() - 1 - gap)[fresh]),
        ("off_policy/ratio/mean", gap.exp()),
    ):
        assert metrics[name] == pytest.approx(float(expected.mean()), rel=1e-5), name


def test_missing_values_are_named():
    trainer = make_trainer(tiny_model(), AlgorithmConfig.model_validate({"kl": {"coef": 0.1}}))
    with pytest.raises(ValueError, match="'r0' has no logprobs/reference"):
        trainer.update(on_policy_rows(4))


def test_the_reference_of_adapters_is_the_model_without_them():
    base, model = tiny_model(), tiny_model()
    adapt(model, LoraConfig(rank=4, alpha=8.0), seed=0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("lora_B"):
                weight.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    trainer = make_trainer(model)
    rows = random_rows(5)
    adapted = trainer.logprobs(rows)
    scored = logprobs_of(WithoutAdapters(model, trainer), rows)
    for got, want in zip(scored, make_trainer(base).logprobs(rows), strict=True):
        assert torch.equal(got, want)
    assert not any(map(torch.allclose, scored, adapted))
    assert all(map(torch.equal, trainer.logprobs(rows), adapted)), "the adapters are on again"


def resumable(dtype: torch.dtype, rule: str) -> Trainer:
    return make_trainer(
        tiny_model(dtype=dtype),
        AlgorithmConfig(entropy_coef=0.01),
        prompts_per_minibatch=2,
        optimizer={
            "name": rule,
            "lr": 0.01,
            "schedule": "cosine",
            "warmup_steps": 3,
            "weight_decay": 0.1,
        },
    )


def states(trainer: Trainer) -> dict[str, torch.Tensor]:
    weights = {f"module/{n}": w for n, w in trainer.named_weights()}
    return {n: t.clone() for n, t in (trainer.state_dict()[0] | weights).items()}


def check_resume(dtype: torch.dtype, rule: str, *, broken: str = "") -> None:
    straight, first = resumable(dtype, rule), resumable(dtype, rule)
    for step in range(5):
        straight.update(random_rows(12, seed=step))
    for step in range(3):
        first.update(random_rows(12, seed=step))
    tensors, metadata = first.state_dict()
    tensors = {n: t.clone() for n, t in tensors.items()}
    if broken in metadata:
        metadata[broken] = 0
    elif broken:
        tensors = {n: t.zero_() if broken in n else t for n, t in tensors.items()}
    second = resumable(dtype, rule)
    second.load_state_dict(tensors, metadata)
    for step in range(3, 5):
        second.update(random_rows(12, seed=step))
    for name, want in states(straight).items():
        assert torch.equal(states(second)[name], want), name


@table("dtype", [torch.float32, torch.bfloat16])
@table("rule", ["adamw", "muon"])
def test_R17_resume_is_bit_exact(dtype: torch.dtype, rule: str):
    check_resume(dtype, rule)


@table("part", ["exp_avg", "/step/", "num_steps", "num_updates", "weights/"])
def test_R17_planted_losses_of_state_are_caught(part: str):
    with pytest.raises(AssertionError):
        check_resume(torch.float32, "adamw", broken=part)


def test_R17_incomplete_or_foreign_state_is_refused():
    trainer = resumable(torch.float32, "adamw")
    trainer.update(random_rows(8))
    tensors, metadata = trainer.state_dict()
    lacking = dict(list(tensors.items())[:-1])
    with pytest.raises(ValueError, match="tensors"):
        resumable(torch.float32, "adamw").load_state_dict(lacking, metadata)
    other = make_trainer(tiny_model(intermediate_size=48))
    with pytest.raises(ValueError, match=r"not this model's.*mlp"):
        other.load_state_dict(tensors, metadata)


def test_supervised_training_learns_and_resumes():
    rows = random_rows(8)
    for row in rows:
        row.columns.clear()
    cfg = SFTTrainerConfig.model_validate({"optimizer": {"lr": 0.01}, "micro_batch_size": 3})

    def trainer() -> Trainer:
        return Trainer(tiny_model(), cfg, CrossEntropy(), total_steps=20)

    straight = trainer()
    measure = partial(evaluate, Models({"policy": straight}), SFT())
    before = to_scalars(measure(rows))["eval/loss"]
    assert to_scalars(straight.update(rows))["train/loss"] == pytest.approx(before, rel=1e-5)
    for _ in range(9):
        straight.update(rows)
    saved = {n: t.clone() for n, t in straight.state_dict()[0].items()}, straight.state_dict()[1]
    for _ in range(10):
        straight.update(rows)
    assert to_scalars(measure(rows))["eval/loss"] < 0.5 * before
    resumed = trainer()
    resumed.load_state_dict(*saved)
    for _ in range(10):
        resumed.update(rows)
    for (name, a), (_, b) in zip(straight.named_weights(), resumed.named_weights(), strict=True):
        assert torch.equal(a, b), name


def test_all_layers_of_adapters_run_what_is_compiled_once(monkeypatch: pytest.MonkeyPatch):
    """A layer whose input needs no gradient would have graphs of its own."""
    rows = random_rows(5)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **_: None)
    found = {}
    for compiles in (False, True):
        model = tiny_model()
        adapt(model, LoraConfig(rank=4, alpha=8.0), seed=0)
        trainer = make_trainer(model, compile=compiles)
        needs: list[bool] = []
        for layer in decoder_layers(model):
            layer.register_forward_pre_hook(
                lambda _, args, needs=needs: needs.append(args[0].requires_grad)
            )
        scores = torch.cat(trainer.logprobs(rows))
        assert needs == [False, False]
        trainer.forward_backward(rows)
        found[compiles] = scores, gradients(trainer), needs[2:]
    (scores, plain, uneven), (again, compiled, even) = found[False], found[True]
    assert not uneven[0]
    assert even
    assert all(even)
    torch.testing.assert_close(again, scores)
    assert compiled.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(compiled[name], gradient, msg=name)


def test_frozen_models_sleep_with_the_trained_ones():
    """Their memory is free meanwhile; awake they say the same, however often they have slept."""
    rows, reference = random_rows(6), tiny_model(seed=3)
    scorer = FrozenScorer(reference, TrainerConfig())
    models = Models({"policy": make_trainer(tiny_model())}, {"reference": scorer})
    before = logprobs_of(scorer, rows)
    for _ in range(2):
        models.sleep()
        assert not any(p.untyped_storage().nbytes() for p in reference.parameters())
        models.wake()
        for found, expected in zip(logprobs_of(scorer, rows), before, strict=True):
            assert torch.equal(found, expected)
