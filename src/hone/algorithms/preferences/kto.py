"""KTO: single completions, each good or not, need no pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from hone.algorithms.algorithm import Loss, Objective, Outputs
from hone.algorithms.preferences.dpo import labelled_rows, logits_by_label, sum_of_rows
from hone.algorithms.preferences.losses import kto
from hone.config.algorithm import Needs, Output
from hone.config.preference import PreferenceConfig
from hone.observe.metrics import Last, Mean, Metrics
from hone.types import Column, LossExtent, MicroBatch, Preference, Row

__all__ = ["KTO"]


class KTO:
    """Implements `Algorithm` for labelled completions, arXiv:2402.01306.

    The divergence in its loss is estimated once a step, over all ranks and before anything is
    trained, by completions of the row before: each prompt is scored with its neighbour's
    completion, so another order gives another estimate. TRL does so by micro-batch, whose size its
    gradient depends on.
    """

    def __init__(self, cfg: PreferenceConfig, *, max_tokens: int) -> None:
        """`max_tokens` of the longest row: neighbours' completions are cut to it."""
        self.max_tokens = max_tokens
        logprobs = frozenset[Output]({"logprobs"})
        self.needs = Needs(scores={"policy": logprobs, "reference": logprobs})
        self.objectives: Mapping[str, Objective] = {"policy": _Completions(cfg)}

    def rows(self, batch: Sequence[Preference], version: int) -> list[Row]:
        del version
        rows = labelled_rows(batch)
        return rows + [
            self._swapped(row, before)
            for row, before in zip(rows, [rows[-1], *rows[:-1]], strict=True)
        ]

    def targets(self, rows: list[Row], batch: Sequence[Preference]) -> Metrics:
        """Rows that give the divergence are done, and leave."""
        swapped = rows[len(rows) // 2 :]
        del rows[len(rows) // 2 :], batch
        scores = [
            (row.column("logprobs/policy") - row.column("logprobs/reference")).sum()
            for row in swapped
        ]
        divergence = torch.stack(scores).mean().clamp(min=0)
        labels = [bool(row.column("chosen")) for row in rows]
        counts = {label: labels.count(label) for label in (True, False)}
        for row, label in zip(rows, labels, strict=True):
            # The mean over all rows of reward x share is the difference of the two means.
            share = (1 if label else -1) * len(rows) / counts[label] if all(counts.values()) else 0
            row.columns["divergence"] = Column(divergence[None], "row")
            row.columns["margin_share"] = Column(torch.tensor([share]), "row")
        return {"kl": Last(float(divergence))}

    def _swapped(self, row: Row, before: Row) -> Row:
        """The prompt of `row` with the completion of `before`."""
        prompt = row.token_ids[: row.loss_mask.index(True)]
        completion = before.token_ids[before.loss_mask.index(True) :]
        completion = completion[: max(self.max_tokens - len(prompt), 1)]
        return replace(
            row,
            id=f"{row.id} with another completion",
            group_id="",
            unit="",
            token_ids=prompt + completion,
            loss_mask=[False] * len(prompt) + [True] * len(completion),
            columns=dict(row.columns),
        )


class _Completions:
    """Implements `Objective`."""

    outputs: frozenset[Output] = frozenset({"logprobs", "mean_logits"})
    outputs_before: frozenset[Output] = frozenset()
    columns = frozenset({"chosen", "logprobs/reference", "divergence", "margin_share"})
    per: LossExtent = "row"

    def __init__(self, cfg: PreferenceConfig) -> None:
        self.cfg = cfg

    def weights(self, rows: Sequence[Row]) -> list[float]:
        return [1 / len(rows)] * len(rows)

    def __call__(self, outputs: Outputs, batch: MicroBatch) -> Loss:
        logprobs = sum_of_rows(outputs["logprobs"], batch)
        scores = logprobs - sum_of_rows(batch.column("logprobs/reference"), batch)
        is_desirable = batch.column("chosen").bool()
        values = kto(scores, is_desirable, batch.column("divergence"), self.cfg)
        rewards, logps = self.cfg.beta * scores.detach(), logprobs.detach()
        share = batch.column("margin_share")
        return Loss(
            values,
            {
                "rewards/chosen": Mean.of(rewards[is_desirable]),
                "rewards/rejected": Mean.of(rewards[~is_desirable]),
                "rewards/margins": Mean.of((rewards * share)[share != 0]),
                "logps/chosen": Mean.of(logps[is_desirable]),
                "logps/rejected": Mean.of(logps[~is_desirable]),
            }
            | logits_by_label(outputs, batch),
        )
