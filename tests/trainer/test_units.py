"""A loss that compares the rows of a unit, and one of whole rows, through the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hone.algorithms.algorithm import Loss, Outputs
from hone.algorithms.settings import Output
from hone.observe.metrics import to_scalars
from hone.trainer.settings import SFTTrainerConfig
from hone.trainer.trainer import Trainer
from hone.types import Column, LossExtent, MicroBatch, Row
from tests.trainer.examples import eager_twin, gradients, random_rows, tiny_model

CUTS: list[dict[str, Any]] = [
    {"micro_batch_size": 2},
    {"micro_batch_size": 5},
    {"max_tokens_per_microbatch": 90},
    {},
]


class Preference:
    """`-logsigmoid(log p(chosen) - log p(rejected))`, averaged over pairs. Or, `per` row,
    `-logsigmoid` of each row's log-probability, with the sign of its label."""

    outputs: frozenset[Output] = frozenset({"logprobs"})
    outputs_before: frozenset[Output] = frozenset()
    columns: frozenset[str] = frozenset({"chosen"})

    def __init__(self, per: LossExtent) -> None:
        self.per: LossExtent = per

    def weights(self, rows: Sequence[Row]) -> list[float]:
        number = len({row.unit for row in rows}) if self.per == "unit" else len(rows)
        return [1 / number] * len(rows)

    def __call__(self, outputs: Outputs, batch: MicroBatch) -> Loss:
        logprobs = outputs["logprobs"]
        zeros = logprobs.new_zeros(batch.num_sequences)
        signed = zeros.index_add(0, batch.sequence_index, logprobs) * (
            2.0 * batch.column("chosen") - 1
        )
        if self.per == "unit":
            signed = logprobs.new_zeros(batch.num_units).index_add(0, batch.unit_index, signed)
        return Loss(-F.logsigmoid(signed / 10))


def pairs(number: int) -> list[Row]:
    """The two of a pair have a group, but do not lie side by side."""
    rows = random_rows(2 * number, seed=3)
    for index, row in enumerate(rows):
        row.group_id = row.unit = f"pair {index % number}"
        row.columns = {"chosen": Column(torch.tensor([index < number]), "row")}
    return rows


def trainer_of(per: LossExtent, **cut: Any) -> Trainer:
    cfg = SFTTrainerConfig.model_validate(cut)
    return Trainer(tiny_model(), cfg, Preference(per), total_steps=10)


def by_hand(rows: Sequence[Row], per: LossExtent) -> tuple[float, dict[str, Tensor]]:
    """In float64, a row at a time."""
    twin = eager_twin(tiny_model())
    signed: dict[str, Tensor] = {}
    for row in rows:
        log_p = torch.log_softmax(twin(torch.tensor([row.token_ids])).logits[0], -1)
        trained = [t for t, is_trained in enumerate(row.loss_mask) if is_trained]
        total = torch.stack([log_p[t - 1, row.token_ids[t]] for t in trained]).sum()
        key = row.unit if per == "unit" else row.id
        sign = 1 if row.column("chosen").item() else -1
        signed[key] = signed.get(key, torch.zeros((), dtype=torch.float64)) + sign * total
    loss = -F.logsigmoid(torch.stack([*signed.values()]) / 10).mean()
    loss.backward()
    return float(loss.detach()), {
        name: p.grad for name, p in twin.named_parameters() if p.grad is not None
    }


def check(trainer: Trainer, rows: list[Row], expected: tuple[float, dict[str, Tensor]]) -> None:
    loss, _ = trainer.forward_backward(rows)
    assert float(loss) == pytest.approx(expected[0], rel=1e-5)
    largest = max(float(g.abs().max()) for g in expected[1].values())
    for name, got in gradients(trainer).items():
        assert float((got - expected[1][name]).abs().max()) / largest < 1e-5, name


@pytest.mark.parametrize("per", ["row", "unit"])
def test_R1_the_gradient_of_rows_and_units_does_not_depend_on_micro_batches(
    per: LossExtent,
) -> None:
    rows = pairs(8)
    expected = by_hand(rows, per)
    for cut in CUTS:
        check(trainer_of(per, **cut), rows, expected)


def test_a_pair_that_is_parted_is_caught() -> None:
    """The planted bug: rows that do not say that they belong together."""
    rows = pairs(8)
    expected = by_hand(rows, "unit")
    parted = trainer_of("unit", micro_batch_size=2)
    parted.objective.weights = lambda rows: [1 / 8] * len(rows)
    for row in rows:
        row.unit = ""
    with pytest.raises(AssertionError):
        check(parted, rows, expected)


def test_values_of_another_extent_are_refused() -> None:
    trainer = trainer_of("unit", micro_batch_size=2)
    trainer.objective.per = "trained"
    with pytest.raises(ValueError, match=r"values of shape \(2,\); per trained they have"):
        trainer.update(pairs(4))


def test_preferences_are_learnt() -> None:
    trainer = trainer_of("unit", optimizer={"lr": 0.01})
    losses = [to_scalars(trainer.update(pairs(4)))["train/loss"] for _ in range(8)]
    assert losses[-1] < 0.5 * losses[0]
