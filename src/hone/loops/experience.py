"""Scored groups to trajectories: what the loss needs for each trained token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from hone.algorithms.advantages import ADVANTAGES, ScoredSample
from hone.algorithms.kl import KL_ESTIMATORS
from hone.config.algorithm import GROUP_ESTIMATORS, AlgorithmConfig
from hone.types import Group, Sample, Trainer, Trajectory

__all__ = ["Experience", "SeparateReference"]


class SeparateReference(Protocol):
    """The frozen model of the KL term, where it is scored beside whatever the trainer does."""

    def begin(self, rows: Sequence[Trajectory], /) -> Callable[[], list[Tensor]]:
        """Begin to score; what is returned waits for the log-probabilities, as those of
        `Trainer.logprobs`. Collective, as is the waiting."""
        ...


@dataclass(slots=True)
class Experience:
    """Builds the rows of a step. Passes that the configuration does not need are not made.

    The policy's own log-probabilities are needed here only for a KL penalty in the reward. The
    trainer takes them itself where several optimizer steps share a rollout, and with one step the
    policy has not moved, so no extra forward is run at all. While a reference elsewhere is waited
    for, what the trainer would take later is taken now.
    """

    trainer: Trainer
    cfg: AlgorithmConfig
    reference: SeparateReference | None = None
    """None: the trainer has it."""
    num_dropped_groups: int = 0
    """Groups of the last `build` with too few valid samples for a baseline."""

    def build(self, groups: Sequence[Group], *, version: int) -> list[Trajectory]:
        """One row for each valid sample, in order. Failed samples leave no trace in them.

        `version` is that of the policy which is about to be trained.
        """
        usable = [group for group in groups if self._has_baseline(group)]
        self.num_dropped_groups = len(groups) - len(usable)
        rows = [
            [_row(sample, group, version) for sample in group.valid_samples] for group in usable
        ]
        flat = [row for group in rows for row in group]
        if not flat:
            return []
        self._score(flat)
        scored = [
            [self._scored(sample, row) for sample, row in zip(group.valid_samples, r, strict=True)]
            for group, r in zip(usable, rows, strict=True)
        ]
        advantages = ADVANTAGES[self.cfg.advantage](scored)
        for row, values in zip(flat, (a for group in advantages for a in group), strict=True):
            row.advantages = values
        return flat

    def _has_baseline(self, group: Group) -> bool:
        required = 2 if self.cfg.advantage in GROUP_ESTIMATORS else 1
        return len(group.valid_samples) >= required

    @property
    def _penalised(self) -> bool:
        return self.cfg.kl.coef > 0 and self.cfg.kl.placement == "reward"

    def _score(self, rows: list[Trajectory]) -> None:
        """Fill in old and reference log-probabilities where they are used."""
        has_reference, scoring = self.cfg.kl.coef > 0, None
        if has_reference and self.reference is not None:
            scoring = self.reference.begin(rows)
        if self._penalised or (scoring is not None and self.trainer.needs_old_logprobs(rows)):
            for row, logprobs in zip(rows, self.trainer.logprobs(rows), strict=True):
                row.old_logprobs = logprobs
        if has_reference:
            references = scoring() if scoring else self.trainer.logprobs(rows, reference=True)
            for row, logprobs in zip(rows, references, strict=True):
                row.ref_logprobs = logprobs

    def _scored(self, sample: Sample, row: Trajectory) -> ScoredSample:
        assert sample.reward is not None, sample.id
        if self._penalised:
            assert row.old_logprobs is not None, "the KL penalty needs the policy's log-probs"
            assert row.ref_logprobs is not None, "the KL penalty needs the reference"
            divergence = KL_ESTIMATORS[self.cfg.kl.estimator](row.old_logprobs, row.ref_logprobs)
            return ScoredSample(sample.reward.total, self.cfg.kl.coef * divergence)
        return ScoredSample(sample.reward.total, torch.zeros(row.num_trained))


def _row(sample: Sample, group: Group, version: int) -> Trajectory:
    """Token ids as they were sampled, the mask as it was recorded.

    A token that the present weights have drawn after older ones counts as stale: it may have been
    drawn over keys and values of theirs, so that the trainer cannot find its log-probability again.
    """
    trained = [t for t, is_trained in enumerate(sample.loss_mask) if is_trained]
    logprobs = [sample.logprobs[t] for t in trained]
    oldest = list(accumulate((version - drawn for drawn in sample.weight_versions), max))
    staleness = [oldest[t] for t in trained]
    return Trajectory(
        id=sample.id,
        group_id=group.id,
        token_ids=[*sample.prompt.token_ids, *sample.token_ids],
        loss_mask=[False] * len(sample.prompt.token_ids) + sample.loss_mask,
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        staleness=torch.tensor(staleness, dtype=torch.int32),
    )
