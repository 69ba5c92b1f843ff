"""The models of a run by role, and what a step does with them.

rows, metrics = models.prepare(algorithm, batch, version=step - 1)
metrics |= models.update(rows)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch.distributed as dist

from hone.algorithms.algorithm import Algorithm
from hone.observe.metrics import Metrics
from hone.trainer.scorer import FrozenScorer, RowScorer
from hone.trainer.trainer import Trainer
from hone.types import Column, Row
from hone.weights.parity import ParityGate

__all__ = ["Models"]

Item = TypeVar("Item")


@dataclass(slots=True)
class Models:
    """What trains and what scores. Passes that the algorithm does not need are not made."""

    trainer: Trainer
    """Of the policy."""
    scorers: Mapping[str, RowScorer] = field(default_factory=dict[str, RowScorer])
    """The other roles, such as `reference`."""
    parity: ParityGate | None = None
    """Compares what engines recorded with the policy, before anything is trained on it."""

    @property
    def groups(self) -> set[dist.ProcessGroup]:
        """Every group that these models have collectives in."""
        groups = self.trainer.mesh.groups
        for scorer in self.scorers.values():
            if isinstance(scorer, FrozenScorer):
                groups = groups | scorer.model.mesh.groups
        return groups

    def prepare(
        self, algorithm: Algorithm[Item], batch: Sequence[Item], *, version: int
    ) -> tuple[list[Row], Metrics]:
        """The rows to train of what a step has collected, with everything that the losses need.
        `version` is that of the policy that is about to be trained. Collective.

        Raises UserError where engines and trainer disagree in the first step of a launch."""
        rows = algorithm.rows(batch, version)
        if rows:
            self._score(algorithm, rows)
        metrics = algorithm.targets(rows, batch)
        if self.parity is not None:
            metrics |= self.parity.check(rows, self.trainer)
        return rows, metrics

    def update(self, rows: Sequence[Row]) -> Metrics:
        """Train on `rows`. Collective."""
        return self.trainer.update(rows)

    def _score(self, algorithm: Algorithm[Item], rows: Sequence[Row]) -> None:
        """Add the outputs that the algorithm reads, as columns `<output>/<role>`.

        The policy is scored where the algorithm asks for it, or where several optimizer steps share
        the rows: with one step it has not moved when its loss is computed. What is elsewhere
        computes meanwhile.
        """
        wanted = dict(algorithm.needs.scores)
        if before := self.trainer.outputs_before(rows):
            wanted["policy"] = wanted.get("policy", frozenset()) | before
        scorers: dict[str, RowScorer] = {"policy": self.trainer, **self.scorers}
        missing = sorted(wanted.keys() - scorers.keys())
        assert not missing, f"the algorithm needs models that the run has not: {missing}"
        pending = {role: scorers[role].begin(rows, outputs) for role, outputs in wanted.items()}
        for role in sorted(pending, key=lambda role: role != "policy"):
            for row, found in zip(rows, pending[role](), strict=True):
                row.columns |= {f"{output}/{role}": Column(v) for output, v in found.items()}
