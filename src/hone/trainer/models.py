"""The models of a run by role, and what a step does with them.

rows, metrics = models.prepare(algorithm, batch, version=step - 1)
metrics |= models.update(algorithm, rows, step)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist
from torch.profiler import record_function

from hone.algorithms.algorithm import Algorithm, Outputs
from hone.observe.merged_trace import RANGE
from hone.observe.metrics import Last, Metrics
from hone.trainer.scorer import FrozenScorer, RowScorer
from hone.trainer.shown_tokens import ShownTokens
from hone.trainer.trainer import Trainer
from hone.types import Column, Row
from hone.weights.parity import ParityGate

__all__ = ["Models"]

Item = TypeVar("Item")


@dataclass(slots=True)
class Models:
    """What trains and what scores in this process. Passes that the algorithm does not need are not
    made."""

    learners: Mapping[str, Trainer]
    """The roles that learn, in the order in which they do: `policy`, `critic`."""
    scorers: Mapping[str, RowScorer] = field(default_factory=dict[str, RowScorer])
    """The other roles, such as `reference`."""
    parity: ParityGate | None = None
    """Compares what engines recorded with the policy, before anything is trained on it."""
    share: Callable[[Mapping[str, Any]], dict[str, Any]] = dict[str, Any]
    """What is found here by name, with what the processes of other roles have found. Collective."""

    @property
    def trainer(self) -> Trainer:
        """Of the policy. Raises KeyError in processes that train another model."""
        return self.learners["policy"]

    @property
    def groups(self) -> set[dist.ProcessGroup]:
        """Every group that these models have collectives in."""
        groups = set[dist.ProcessGroup]()
        for trainer in self.learners.values():
            groups |= trainer.mesh.groups
        for scorer in self.scorers.values():
            if isinstance(scorer, FrozenScorer):
                groups = groups | scorer.model.mesh.groups
        return groups

    def prepare(
        self,
        algorithm: Algorithm[Item],
        batch: Sequence[Item],
        *,
        version: int,
        kept: dict[str, list[Outputs]] | None = None,
    ) -> tuple[list[Row], Metrics]:
        """The rows to train of what a step has collected, with everything that the losses need.
        `version` is that of the policy that is about to be trained. `kept` is what roles that do
        not learn have said of the same batch before, and takes what they say now. Collective.

        Raises UserError where engines and trainer disagree in the first step of a launch."""
        rows = algorithm.rows(batch, version)
        if rows:
            self._score(algorithm, rows, {} if kept is None else kept)
        metrics = algorithm.targets(rows, batch)
        if self.parity is not None:
            metrics |= self.parity.check(rows, self.trainer)
        return rows, metrics

    def update(
        self,
        algorithm: Algorithm[Item],
        rows: Sequence[Row],
        step: int,
        *,
        shown_ids: frozenset[str] = frozenset(),
    ) -> Metrics:
        """Train on `rows` every role that learns in `step`; those of `shown_ids` then have what the
        policy says of their tokens, as columns. What the policy's `train/` metrics are
        for it, `<role>/` ones are for another role. Collective."""
        metrics: Metrics = {}
        shown = ShownTokens(shown_ids) if shown_ids else None
        for role, trainer in self.learners.items():
            if step > algorithm.needs.learns_after.get(role, 0):
                with record_function(f"{RANGE}update {role}"):
                    own = trainer.update(rows, shown if role == "policy" else None)
                prefix = "train/" if role == "policy" else f"{role}/"
                metrics |= {key.replace("train/", prefix): value for key, value in own.items()}
        if shown is not None and "policy" in self.learners:  # once all have trained on equal rows
            shown.add_to(rows, self.trainer.mesh)
        return self.share(metrics | self._memory())

    def _memory(self) -> Metrics:
        """What each role here holds on the device between its passes, in GiB, of this process, and
        what it has given up."""
        held = {role: trainer.device_bytes for role, trainer in self.learners.items()}
        frozen = {r: s for r, s in self.scorers.items() if isinstance(s, FrozenScorer)}
        held |= {role: scorer.device_bytes for role, scorer in frozen.items()}
        metrics: Metrics = {
            f"mem/{role}_gib": Last(num_bytes / 2**30) for role, num_bytes in held.items()
        }
        for part in (*self.learners.values(), *frozen.values()):
            metrics |= part.repair.take_metrics()
        return metrics

    def sleep(self) -> None:
        """Let all that learn leave the device to an engine, as `Trainer.sleep`."""
        for trainer in self.learners.values():
            trainer.sleep()

    def wake(self) -> None:
        """Bring back what `sleep` moved away. Raises as `Policy.wake`."""
        for trainer in self.learners.values():
            trainer.wake()

    def _score(
        self, algorithm: Algorithm[Item], rows: Sequence[Row], kept: dict[str, list[Outputs]]
    ) -> None:
        """Add the outputs that the algorithm reads, as columns `<output>/<role>`.

        What learns is scored where the algorithm asks for it, or where several optimizer steps
        share the rows: with one step it has not moved when its loss is computed. What is elsewhere
        computes meanwhile; every process gets what all have found.
        """
        wanted = dict(algorithm.needs.scores)
        for role, trainer in self.learners.items():
            if before := trainer.outputs_before(rows):
                wanted[role] = wanted.get(role, frozenset()) | before
        scorers: dict[str, RowScorer] = {**self.learners, **self.scorers}
        pending = {
            role: scorers[role].begin(rows, outputs)
            for role, outputs in wanted.items()
            if role in scorers and role not in kept
        }
        own: dict[str, list[Outputs]] = {**kept}
        for role in sorted(pending, key=lambda role: role not in self.learners):
            with record_function(f"{RANGE}score {role}"):
                own[role] = pending[role]()
        scored: dict[str, list[Outputs]] = self.share(own)
        missing = sorted(wanted.keys() - scored.keys())
        assert not missing, f"the algorithm needs models that the run has not: {missing}"
        kept |= {role: found for role, found in scored.items() if role in self.scorers}
        for role, of_rows in scored.items():
            for row, found in zip(rows, of_rows, strict=True):
                row.columns |= {f"{output}/{role}": Column(v) for output, v in found.items()}
