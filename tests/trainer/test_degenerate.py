"""R23: degenerate numbers stop or do nothing; they never spread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hone.algorithms.losses import LOSSES
from hone.algorithms.objective import PolicyObjective
from hone.algorithms.settings import AlgorithmConfig
from hone.observe.metrics import to_scalars
from hone.trainer.policy import NonFiniteError
from hone.trainer.settings import TrainerConfig
from hone.trainer.trainer import Trainer
from hone.types import Column, Row
from tests.observe.test_disk import largest_file
from tests.tables import table
from tests.trainer.examples import gradients, make_trainer, random_rows, tiny_model


def state(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in trainer.state_dict()[0].items()}


def assert_unchanged(trainer: Trainer, before: dict[str, torch.Tensor]) -> None:
    after = state(trainer)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    assert all(p.grad is None for p in trainer.policy.masters.values())


def mask_all(rows: list[Row]) -> None:
    for row in rows:
        row.loss_mask = [False] * row.num_tokens
        row.columns["advantages"] = Column(torch.empty(0))
        row.columns["logprobs/policy"] = Column(torch.empty(0))
        row.columns["logprobs/engine"] = Column(torch.empty(0))
        row.columns["logprobs/reference"] = Column(torch.empty(0))


def warm_trainer(**settings: Any) -> Trainer:
    """A trainer whose optimizer has momentum, which a zero gradient would still spend."""
    trainer = make_trainer(tiny_model(), optimizer={"lr": 0.01}, **settings)
    trainer.update(random_rows(8, seed=9))
    return trainer


def test_R23_a_step_without_trained_tokens_is_a_counted_no_op():
    trainer = warm_trainer()
    before, steps = state(trainer), trainer.optimizer.num_steps
    rows = random_rows(4)
    mask_all(rows)
    assert to_scalars(trainer.update(rows)) == {"train/num_skipped_steps": 1.0}
    assert to_scalars(trainer.update([])) == {"train/num_skipped_steps": 1.0}
    assert_unchanged(trainer, before)
    assert trainer.optimizer.num_steps == steps
    assert [len(v) for v in trainer.logprobs(rows)] == [0] * 4


def test_R23_masked_rows_beside_trained_ones_change_nothing():
    results = []
    for extra in (0, 3):
        trainer = make_trainer(tiny_model(), AlgorithmConfig(aggregation="sequence_mean"))
        masked = random_rows(3, seed=4)
        mask_all(masked)
        trainer.forward_backward(random_rows(5) + masked[:extra])
        results.append(gradients(trainer))
    for name, want in results[0].items():
        assert torch.equal(results[1][name], want), name


def test_R23_one_trained_token():
    row = Row(
        id="a",
        token_ids=[1, 2],
        loss_mask=[False, True],
        columns={"advantages": Column(torch.ones(1))},
    )
    metrics = to_scalars(make_trainer(tiny_model()).update([row]))
    assert metrics["train/num_tokens"] == 1
    assert 0 < metrics["train/grad_norm"] < float("inf")
    assert metrics["policy/ratio/mean"] == 1.0


def test_R23_constant_rewards_give_a_zero_gradient():
    trainer = make_trainer(tiny_model(), optimizer={"lr": 0.01})
    before = {n: p.detach().clone() for n, p in trainer.policy.masters.items()}
    rows = random_rows(8)
    for row in rows:
        row.columns["advantages"] = Column(torch.zeros(row.num_trained))
    metrics = to_scalars(trainer.update(rows))
    assert metrics["train/grad_norm"] == 0
    assert metrics["train/share_with_gradient"] == 0
    assert all(torch.equal(p, before[n]) for n, p in trainer.policy.masters.items())


@table("value", [float("inf"), float("-inf"), float("nan")])
@table("field", ["advantages", "logprobs/engine", "logprobs/policy"])
def test_R23_non_finite_inputs_stop_before_anything_is_touched(
    field: str, value: float, tmp_path: Path
):
    trainer = Trainer(
        tiny_model(),
        TrainerConfig(prompts_per_minibatch=1),
        PolicyObjective(AlgorithmConfig(), max_completion_tokens=24),
        total_steps=10,
        dump_dir=tmp_path,
    )
    trainer.update(random_rows(8, seed=9))
    before, steps = state(trainer), trainer.optimizer.num_steps
    rows = random_rows(8)
    rows[6].column(field)[-1] = value
    with pytest.raises(NonFiniteError, match=rf"{field} of sequence 'r6' is not finite"):
        trainer.update(rows)
    assert_unchanged(trainer, before)
    dumped = torch.load(tmp_path / f"non_finite_step_{steps}.pt", weights_only=True)
    assert [row["token_ids"] for row in dumped] == [row.token_ids for row in rows]
    assert not dumped[6]["columns"][field]["values"].isfinite().all()


def test_rows_that_cannot_be_kept_do_not_hide_the_error(tmp_path: Path):
    trainer = Trainer(
        tiny_model(),
        TrainerConfig(prompts_per_minibatch=1),
        PolicyObjective(AlgorithmConfig(), max_completion_tokens=24),
        total_steps=10,
        dump_dir=tmp_path,
    )
    rows = random_rows(8)
    rows[6].column("advantages")[-1] = float("nan")
    told = rf"'r6' is not finite .* could not be written to {tmp_path}/.*\.pt \(run\.dir\): "
    with largest_file(500), pytest.raises(NonFiniteError, match=told):
        trainer.update(rows)
    assert not list(tmp_path.iterdir())


def test_R23_non_finite_gradient_stops_and_is_named():
    trainer = warm_trainer()
    before = state(trainer)
    broken = trainer.policy.masters["model.layers.1.mlp.down_proj.weight"]

    def overflow(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.view(-1)[5] = float("inf")

    hook = broken.register_post_accumulate_grad_hook(overflow)
    expected = r"gradient of model\.layers\.1\.mlp\.down_proj\.weight is not finite"
    with pytest.raises(NonFiniteError, match=expected):
        trainer.update(random_rows(8))
    assert_unchanged(trainer, before)
    hook.remove()
    trainer.update(random_rows(8))


def test_R23_planted_missing_check_spreads(monkeypatch: pytest.MonkeyPatch):
    trainer = warm_trainer()
    before = state(trainer)
    monkeypatch.setattr(Trainer, "_check", lambda self, rows: None)
    monkeypatch.setattr(Trainer, "_stop", lambda self, culprit, rows: None)
    rows = random_rows(8)
    rows[0].column("advantages")[0] = float("nan")
    with pytest.raises(NonFiniteError, match="the optimizer produced weights"):
        trainer.update(rows)
    with pytest.raises(AssertionError):
        assert_unchanged(trainer, before)


@table("loss", LOSSES)
def test_R23_a_huge_log_ratio_stays_finite(loss: str):
    rows = random_rows(8)
    rows[0].column("logprobs/policy")[:] = -1e4
    rows[1].column("logprobs/engine")[:] = -1e30
    cfg = AlgorithmConfig.model_validate({"loss": loss, "correction": {"kind": "tis"}})
    trainer = make_trainer(tiny_model(), cfg, optimizer={"lr": 0.01})
    metrics = to_scalars(trainer.update(rows))
    assert 0 < metrics["train/grad_norm"] < float("inf")
    assert all(w.isfinite().all() for _, w in trainer.named_weights())


def test_greedy_temperature_is_refused():
    with pytest.raises(ValueError, match="temperature=0"):
        Trainer(
            tiny_model(),
            TrainerConfig(),
            PolicyObjective(AlgorithmConfig(), max_completion_tokens=8),
            temperature=0,
            total_steps=1,
        )
