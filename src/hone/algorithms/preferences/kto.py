"""KTO: single completions, each good or not, need no pairs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import torch

from hone.algorithms.algorithm import Loss, Objective, Outputs
from hone.algorithms.preferences.dpo import labelled_rows, logits_by_label, sum_of_rows
from hone.algorithms.preferences.losses import kto
from hone.algorithms.settings import Needs, Output, PreferenceConfig
from hone.observe.metrics import Last, Mean, Metrics
from hone.types import Column, LossExtent, MicroBatch, Preference, Row

__all__ = ["KTO", "KTOObjective", "mismatched"]

_log = logging.getLogger(__name__)


class KTO:
    """KTO, arXiv:2402.01306, for labelled completions. Implements `Algorithm`.

    The divergence in the loss is estimated once a step, over all ranks and before the update, from
    prompts paired with completions of other prompts (`mismatched`); it depends on the order of the
    rows. TRL instead pairs each row with the previous completion of its micro-batch, so that its
    gradient depends on the micro-batch size, and that completion may answer the same prompt. A step
    whose rows all have the same prompt has no estimate: its divergence is 0, the smallest possible
    value, and a warning is logged.
    """

    def __init__(self, cfg: PreferenceConfig, *, max_tokens: int) -> None:
        """`max_tokens` is the longest row; mismatched prompts and completions are cut to it."""
        self.max_tokens = max_tokens
        self._has_warned = False
        logprobs = frozenset[Output]({"logprobs"})
        self.needs = Needs(scores={"policy": logprobs, "reference": logprobs})
        self.objectives: Mapping[str, Objective] = {"policy": KTOObjective(cfg)}

    def rows(self, batch: Sequence[Preference], version: int) -> list[Row]:
        del version
        rows = labelled_rows(batch)
        pairs = mismatched([(*_prompt(row), *row.model_input.key) for row in rows])
        if not pairs and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "warning: the %d rows of a step have one prompt, and KTO's divergence comes from "
                "completions of others: it is taken as 0 in such a step. Shuffle the rows "
                "(data.shuffle), or raise data.examples_per_step.",
                len(rows),
            )
        return rows + [self._swapped(rows[a], rows[b]) for a, b in pairs]

    def targets(self, rows: list[Row], batch: Sequence[Preference]) -> Metrics:
        """Add the columns `divergence` and `margin_share`; remove the mismatched rows, from which
        the divergence was estimated."""
        swapped = rows[len(batch) :]
        del rows[len(batch) :]
        scores = [
            (row.column("logprobs/policy") - row.column("logprobs/reference")).sum()
            for row in swapped
        ]
        divergence = torch.stack(scores).mean().clamp(min=0) if scores else torch.zeros(())
        labels = [bool(row.column("chosen")) for row in rows]
        counts = {label: labels.count(label) for label in (True, False)}
        for row, label in zip(rows, labels, strict=True):
            # The mean over all rows of reward x share is the difference of the two means.
            share = (1 if label else -1) * len(rows) / counts[label] if all(counts.values()) else 0
            row.columns["divergence"] = Column(divergence[None], "row")
            row.columns["margin_share"] = Column(torch.tensor([share]), "row")
        return {"kl": Last(float(divergence))} if scores else {}

    def _swapped(self, row: Row, other: Row) -> Row:
        """The prompt of `row` with the completion of `other`."""
        prompt = _prompt(row)
        completion = slice(len(_prompt(other)), None)
        longest = max(self.max_tokens, len(prompt) + 1)
        return replace(
            row,
            id=f"{row.id} with another completion",
            group_id="",
            unit="",
            token_ids=(prompt + other.token_ids[completion])[:longest],
            loss_mask=([False] * len(prompt) + other.loss_mask[completion])[:longest],
            columns=dict(row.columns),
        )


def mismatched(prompts: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Pairs (i, j) of rows with different prompts: prompt i is scored with completion j.

    Rows are sorted into one block for each prompt, in the order of their first rows. Each row takes
    the completion that lies as many rows before it, cyclically, as the largest block has rows: the
    previous row where all prompts differ. So each completion is used once. Only where one prompt
    has more than half of the rows, the rows that would meet their own prompt are left out.
    """
    if not prompts:
        return []
    first: dict[Hashable, int] = {}
    for row, prompt in enumerate(prompts):
        first.setdefault(prompt, row)
    in_blocks = sorted(range(len(prompts)), key=lambda row: first[prompts[row]])
    shift = max(Counter(prompts).values())
    pairs = ((row, in_blocks[place - shift]) for place, row in enumerate(in_blocks))
    return sorted((i, j) for i, j in pairs if prompts[i] != prompts[j])


def _prompt(row: Row) -> list[int]:
    return row.token_ids[: row.loss_mask.index(True)]


class KTOObjective:
    """The loss of labelled completions. Implements `Objective`."""

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
