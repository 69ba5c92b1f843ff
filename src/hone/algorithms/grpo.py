"""GRPO and its kin: policy gradients whose baseline comes from samples, not from a critic.

One algorithm with three choices, each a pure function: the advantage (`advantages.py`: GRPO
arXiv:2402.03300, Dr.GRPO, RLOO, REINFORCE++), the loss of a token (`losses/`, a file each) and how
tokens are averaged (`aggregation.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from hone.algorithms.advantages import ADVANTAGES, ScoredSample
from hone.algorithms.algorithm import Objective
from hone.algorithms.kl import KL_ESTIMATORS
from hone.algorithms.objective import PolicyObjective
from hone.config.algorithm import AlgorithmConfig
from hone.types import Group, Sample, Trajectory

__all__ = ["GRPO"]


class GRPO:
    """Implements `Algorithm`."""

    def __init__(self, cfg: AlgorithmConfig, *, max_completion_tokens: int) -> None:
        """`max_completion_tokens` as in `PolicyObjective`."""
        self.cfg = cfg
        self.needs = cfg.needs
        self.objectives: Mapping[str, Objective] = {
            "policy": PolicyObjective(cfg, max_completion_tokens=max_completion_tokens)
        }

    def rows(self, groups: Sequence[Group], version: int) -> list[Trajectory]:
        """Failed samples leave no trace in them."""
        return [_row(sample, group, version) for group in groups for sample in group.valid_samples]

    def targets(self, rows: Sequence[Trajectory], groups: Sequence[Group]) -> None:
        """Advantages, one for each trained token."""
        of_samples = iter(rows)
        scored = [
            [self._scored(sample, next(of_samples)) for sample in group.valid_samples]
            for group in groups
        ]
        advantages = ADVANTAGES[self.cfg.advantage](scored)
        for row, values in zip(rows, (a for group in advantages for a in group), strict=True):
            row.advantages = values

    def _scored(self, sample: Sample, row: Trajectory) -> ScoredSample:
        assert sample.reward is not None, sample.id
        if not self.cfg.penalises_reward:
            return ScoredSample(sample.reward.total, torch.zeros(row.num_trained))
        assert row.old_logprobs is not None, "the KL penalty needs the policy's log-probs"
        assert row.ref_logprobs is not None, "the KL penalty needs the reference"
        divergence = KL_ESTIMATORS[self.cfg.kl.estimator](row.old_logprobs, row.ref_logprobs)
        return ScoredSample(sample.reward.total, self.cfg.kl.coef * divergence)


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
