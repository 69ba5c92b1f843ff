"""The models of a run by role, and what a step does with them.

rows, metrics = models.prepare(algorithm, groups, version=step - 1)
metrics |= models.trainer.update(rows)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from hone.algorithms.algorithm import Algorithm
from hone.observe.metrics import Metrics, Sum
from hone.trainer.scorer import FrozenScorer, RowScorer
from hone.trainer.trainer import Trainer
from hone.types import Group, Trajectory
from hone.weights.parity import ParityGate

__all__ = ["Models"]


@dataclass(slots=True)
class Models:
    """What trains and what scores. Passes that the algorithm does not need are not made."""

    trainer: Trainer
    """Of the policy."""
    reference: RowScorer | None = None
    parity: ParityGate | None = None
    """Compares what engines recorded with the policy, before anything is trained on it."""

    @property
    def groups(self) -> set[dist.ProcessGroup]:
        """Every group that these models have collectives in."""
        groups = self.trainer.mesh.groups
        if isinstance(self.reference, FrozenScorer):
            groups = groups | self.reference.model.mesh.groups
        return groups

    def prepare(
        self, algorithm: Algorithm, groups: Sequence[Group], *, version: int
    ) -> tuple[list[Trajectory], Metrics]:
        """The rows to train: one for each valid sample, in order, of the groups that have enough of
        them. `version` is that of the policy that is about to be trained. Collective.

        Raises UserError where engines and trainer disagree in the first step of a launch."""
        needed = algorithm.needs.samples_per_group
        usable = [group for group in groups if len(group.valid_samples) >= needed]
        rows = algorithm.rows(usable, version)
        metrics: Metrics = {"rollout/groups_without_baseline": Sum(len(groups) - len(usable))}
        if rows:
            self._score(algorithm, rows)
            algorithm.targets(rows, usable)
        if self.parity is not None:
            metrics |= self.parity.check(rows, self.trainer)
        return rows, metrics

    def _score(self, algorithm: Algorithm, rows: Sequence[Trajectory]) -> None:
        """Fill in the log-probabilities that the algorithm needs.

        The policy's own are needed before the update only where the algorithm asks for them: the
        trainer takes them itself where several optimizer steps share a rollout, and with one step
        the policy has not moved. While a reference elsewhere is waited for, what the trainer would
        take later is taken now.
        """
        scores, pending = algorithm.needs.scores, None
        if "reference" in scores:
            assert self.reference is not None, "the algorithm needs a reference"
            pending = self.reference.begin(rows)
        if "policy" in scores or (pending is not None and self.trainer.needs_old_logprobs(rows)):
            for row, logprobs in zip(rows, self.trainer.logprobs(rows), strict=True):
                row.old_logprobs = logprobs
        if pending is not None:
            for row, logprobs in zip(rows, pending(), strict=True):
                row.ref_logprobs = logprobs
