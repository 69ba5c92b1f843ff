"""Reward models: one value for each completion, larger for the chosen one of a pair.

The value is that of transformers' `AutoModelForSequenceClassification` with one label: the output
at the last token that is not padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.algorithms.algorithm import Loss, Objective, Outputs
from hone.algorithms.preferences.dpo import labelled_rows
from hone.algorithms.settings import BradleyTerryConfig, Needs, Output
from hone.observe.metrics import Max, Mean, Metrics, Min
from hone.types import Column, LossExtent, MicroBatch, Preference, Row

__all__ = ["BradleyTerry", "RewardModeling", "bradley_terry", "valued_at_end"]


class RewardModeling:
    """Reward modeling on pairs of completions. Implements `Algorithm`. A unit is a pair; its weight
    is 1 / (number of pairs in the optimizer step, on all ranks)."""

    def __init__(self, cfg: BradleyTerryConfig, *, pad_id: int | None) -> None:
        """`pad_id` is the padding token in the saved model's config."""
        self._pad_id = pad_id
        self.needs = Needs()
        self.objectives: Mapping[str, Objective] = {"policy": BradleyTerry(cfg)}

    def rows(self, batch: Sequence[Preference], version: int) -> list[Row]:
        del version
        margins = [item.margin for item in batch for _ in item.rows]
        return [
            replace(
                valued_at_end(row.id, row.token_ids, pad_id=self._pad_id),
                group_id=row.group_id,
                unit=row.unit,
                model_input=row.model_input,
                columns=row.columns | {"margin": Column(torch.tensor([margin]), "row")},
            )
            for row, margin in zip(labelled_rows(batch), margins, strict=True)
        ]

    def targets(self, rows: Sequence[Row], batch: Sequence[Preference]) -> Metrics:
        del rows, batch
        return {}


class BradleyTerry:
    """The loss of pairs of values. Implements `Objective`."""

    outputs: frozenset[Output] = frozenset({"values"})
    outputs_before: frozenset[Output] = frozenset()
    columns = frozenset({"chosen", "margin"})
    per: LossExtent = "unit"

    def __init__(self, cfg: BradleyTerryConfig) -> None:
        self._cfg = cfg

    def weights(self, rows: Sequence[Row]) -> list[float]:
        return [1 / len({row.unit for row in rows})] * len(rows)

    def __call__(self, outputs: Outputs, batch: MicroBatch) -> Loss:
        """The loss of U pairs. Rows are those of `valued_at_end` and have one value each."""
        rewards, is_chosen = outputs["values"], batch.column("chosen").bool()

        def of_units(values: Tensor, mask: Tensor) -> Tensor:
            zeros = values.new_zeros(batch.num_units)
            return zeros.index_add(0, batch.unit_index, torch.where(mask, values, 0.0))

        chosen, rejected = of_units(rewards, is_chosen), of_units(rewards, ~is_chosen)
        margin = of_units(batch.column("margin"), is_chosen)  # both rows of a pair have it
        values = bradley_terry(chosen, rejected, margin, center_coef=self._cfg.center_coef)
        return Loss(values, _metrics(rewards.detach(), (chosen - rejected).detach()))


def bradley_terry(
    chosen: Tensor, rejected: Tensor, margin: Tensor, *, center_coef: float
) -> Tensor:
    """The loss of U pairs of rewards, [U], as in TRL 1.16's `RewardTrainer`."""
    return -F.logsigmoid(chosen - rejected - margin) + center_coef * (chosen + rejected) ** 2


def _metrics(rewards: Tensor, differences: Tensor) -> Metrics:
    """Metrics under TRL's names."""
    return {
        "accuracy": Mean.of((differences > 0).float()),
        "margin": Mean.of(differences),
        "min_reward": Min(rewards.min()),
        "mean_reward": Mean.of(rewards),
        "max_reward": Max(rewards.max()),
    }


def valued_at_end(row_id: str, token_ids: Sequence[int], *, pad_id: int | None) -> Row:
    """A row for which a model gives one value: at its last token that is not padding, as in
    transformers. The value of a position is read where the next token is predicted, so one token is
    appended; any will do, since no earlier token attends to it."""
    end = next((n for n in range(len(token_ids), 0, -1) if token_ids[n - 1] != pad_id), 1)
    return Row(id=row_id, token_ids=[*token_ids[:end], 0], loss_mask=[False] * end + [True])
