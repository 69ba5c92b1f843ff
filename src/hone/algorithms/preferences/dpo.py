"""DPO and its kin: the better of two completions becomes more likely than the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hone.algorithms.algorithm import Loss, Objective, Outputs
from hone.algorithms.preferences.losses import LOSSES, SFT_WEIGHT, Pairs, log_odds_of_chosen
from hone.algorithms.settings import Needs, Output, PreferenceConfig
from hone.observe.metrics import Mean, Metrics
from hone.types import Column, LossExtent, MicroBatch, Preference, Row

__all__ = ["DPO", "PairObjective", "labelled_rows", "logits_by_label", "sum_of_rows"]


class DPO:
    """DPO and its kin: the rows of pairs of completions, the chosen one before the rejected one.

    Most of the losses need the column `logprobs/reference`, [N] float32, of each row. The weight of
    a pair is 1 / (number of pairs in the optimizer step, on all ranks). Implements `Algorithm` for
    items of `Preference`.
    """

    def __init__(self, cfg: PreferenceConfig) -> None:
        self.cfg = cfg
        reference: dict[str, frozenset[Output]] = {"reference": frozenset({"logprobs"})}
        self.needs = Needs(scores=reference if cfg.needs_reference else {})
        self.objectives: Mapping[str, Objective] = {"policy": PairObjective(cfg)}

    def rows(self, batch: Sequence[Preference], version: int) -> list[Row]:
        del version
        return labelled_rows(batch)

    def targets(self, rows: Sequence[Row], batch: Sequence[Preference]) -> Metrics:
        """Add the column `pairs_per_token`: pairs of the step over chosen tokens of the step. A
        pair's summed cross-entropy times it, averaged over pairs, is the mean over tokens."""
        num_chosen = sum(row.num_trained for row in rows if bool(row.column("chosen")))
        pairs_per_token = Column(torch.tensor([len(batch) / max(num_chosen, 1)]), "row")
        for row in rows:
            row.columns["pairs_per_token"] = pairs_per_token
        return {}


class PairObjective:
    """A weighted sum of losses of pairs. Implements `Objective`."""

    outputs: frozenset[Output] = frozenset({"logprobs", "mean_logits"})
    outputs_before: frozenset[Output] = frozenset()
    per: LossExtent = "unit"

    def __init__(self, cfg: PreferenceConfig) -> None:
        self.cfg = cfg
        reference = {"logprobs/reference"} if cfg.needs_reference else set[str]()
        self.columns = frozenset({"chosen", "pairs_per_token"} | reference)

    def weights(self, rows: Sequence[Row]) -> list[float]:
        return [1 / len({row.unit for row in rows})] * len(rows)

    def __call__(self, outputs: Outputs, batch: MicroBatch) -> Loss:
        cfg, is_chosen = self.cfg, batch.column("chosen").bool()
        logprobs = sum_of_rows(outputs["logprobs"], batch)
        reference = torch.zeros_like(logprobs)
        if cfg.needs_reference:
            reference = sum_of_rows(batch.column("logprobs/reference"), batch)
        num_tokens = sum_of_rows(torch.ones_like(outputs["logprobs"]), batch)

        def of_units(values: Tensor, mask: Tensor) -> Tensor:
            zeros = values.new_zeros(batch.num_units)
            return zeros.index_add(0, batch.unit_index, torch.where(mask, values, 0.0))

        pairs = Pairs(
            chosen=of_units(logprobs, is_chosen),
            rejected=of_units(logprobs, ~is_chosen),
            reference_chosen=of_units(reference, is_chosen),
            reference_rejected=of_units(reference, ~is_chosen),
            num_chosen=of_units(num_tokens, is_chosen),
            num_rejected=of_units(num_tokens, ~is_chosen),
        )
        pairs_per_token = of_units(batch.column("pairs_per_token").float(), is_chosen)
        values = torch.zeros_like(pairs.chosen)
        for name, weight in cfg.losses.items():
            term = LOSSES[name](pairs, cfg)
            if name in SFT_WEIGHT:
                term = term - SFT_WEIGHT[name] * pairs.chosen * pairs_per_token
            values = values + weight * term
        return Loss(values, _metrics(pairs, cfg) | logits_by_label(outputs, batch))


def _metrics(pairs: Pairs, cfg: PreferenceConfig) -> Metrics:
    """Metrics under TRL's names. The rewards of simpo and orpo come from mean log-probabilities, as
    in TRL. `logps/...` are sums for every loss; TRL logs means for these two."""
    with torch.no_grad():
        chosen, rejected = pairs.chosen_scores, pairs.rejected_scores
        if not cfg.losses.keys().isdisjoint({"simpo", "orpo"}):
            chosen, rejected = chosen / pairs.num_chosen, rejected / pairs.num_rejected
        metrics: Metrics = {
            "rewards/chosen": Mean.of(cfg.beta * chosen),
            "rewards/rejected": Mean.of(cfg.beta * rejected),
            "rewards/margins": Mean.of(cfg.beta * (chosen - rejected)),
            "rewards/accuracies": Mean.of((chosen > rejected).float()),
            "logps/chosen": Mean.of(pairs.chosen),
            "logps/rejected": Mean.of(pairs.rejected),
            "nll_loss": Mean(-pairs.chosen.double().sum(), pairs.num_chosen.double().sum()),
        }
        if "orpo" in cfg.losses:
            odds = log_odds_of_chosen(pairs)
            metrics |= {
                "log_odds_chosen": Mean.of(odds),
                "log_odds_ratio": Mean.of(torch.nn.functional.logsigmoid(odds)),
            }
        return metrics


def logits_by_label(outputs: Outputs, batch: MicroBatch) -> Metrics:
    """Mean logits over the vocabulary and the completions' tokens, under the names of TRL's
    `DPOTrainer` and `KTOTrainer`. TRL's `CPOTrainer` and `ORPOTrainer` also average over prompts
    and padding."""
    logits_N = outputs["mean_logits"].double()
    is_chosen_N = batch.column("chosen").bool()[batch.sequence_index]
    return {
        f"logits/{label}": Mean((logits_N * mask_N).sum(), mask_N.sum())
        for label, mask_N in (("chosen", is_chosen_N), ("rejected", ~is_chosen_N))
    }


def labelled_rows(batch: Sequence[Preference]) -> list[Row]:
    """Copies of the rows of preferences with their label in the column `chosen`. The rows of a pair
    are one unit; a pair that occurs twice in a step makes two units."""
    rows: list[Row] = []
    for number, item in enumerate(batch):
        unit = f"{number}:{item.id}" if len(item.rows) > 1 else ""
        for row, label in zip(item.rows, item.labels, strict=True):
            chosen = Column(torch.tensor([label]), "row")
            rows.append(replace(row, group_id=unit, unit=unit, columns={"chosen": chosen}))
    return rows


def sum_of_rows(values: Tensor, batch: MicroBatch) -> Tensor:
    """Sums over each row, [S], of the values of trained tokens, [N]."""
    return values.new_zeros(batch.num_sequences).index_add(0, batch.sequence_index, values)
