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
from hone.config.algorithm import Needs, Output
from hone.config.preference import PreferenceConfig
from hone.observe.metrics import Last, Mean, Metrics
from hone.types import Column, LossExtent, MicroBatch, Preference, Row

__all__ = ["KTO", "mismatched"]

_log = logging.getLogger(__name__)


class KTO:
    """Implements `Algorithm` for labelled completions, arXiv:2402.01306.

    The divergence in its loss is estimated once a step, over all ranks and before anything is
    trained, by completions that answer other prompts (`mismatched`), so another order gives another
    estimate. TRL takes that of the row before in a micro-batch, whose size its gradient depends on
    and which may answer the same prompt. A step whose rows all have one prompt has no estimate: its
    divergence is 0, the least that there is, which is warned of.
    """

    def __init__(self, cfg: PreferenceConfig, *, max_tokens: int) -> None:
        """`max_tokens` of the longest row: other prompts' completions are cut to it."""
        self.max_tokens = max_tokens
        self._has_warned = False
        logprobs = frozenset[Output]({"logprobs"})
        self.needs = Needs(scores={"policy": logprobs, "reference": logprobs})
        self.objectives: Mapping[str, Objective] = {"policy": _Completions(cfg)}

    def rows(self, batch: Sequence[Preference], version: int) -> list[Row]:
        del version
        rows = labelled_rows(batch)
        pairs = mismatched([tuple(_prompt(row)) for row in rows])
        if not pairs and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "warning: the %d rows of a step have one prompt, and KTO's divergence comes from "
                "completions of others: it is taken as 0 in such a step. Shuffle the rows "
                "(data.shuffle), or raise data.examples_per_step.",
                len(rows),
            )
        return rows + [self._swapped(rows[asked], rows[said]) for asked, said in pairs]

    def targets(self, rows: list[Row], batch: Sequence[Preference]) -> Metrics:
        """Rows that give the divergence are done, and leave."""
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
    """Which row's prompt is scored with which other row's completion: one of a row whose prompt
    differs.

    Rows of a prompt in one block, each takes the completion of as many rows before as the largest
    block has: the row before where all prompts differ. Each completion is taken once, but of a
    prompt with more than half of the rows, some of which are left out, as many as are too many.
    """
    if not prompts:
        return []
    first: dict[Hashable, int] = {}
    for number, prompt in enumerate(prompts):
        first.setdefault(prompt, number)
    in_blocks = sorted(range(len(prompts)), key=lambda number: first[prompts[number]])
    shift = max(Counter(prompts).values())
    pairs = ((asked, in_blocks[place - shift]) for place, asked in enumerate(in_blocks))
    return sorted((asked, said) for asked, said in pairs if prompts[asked] != prompts[said])


def _prompt(row: Row) -> list[int]:
    return row.token_ids[: row.loss_mask.index(True)]


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
