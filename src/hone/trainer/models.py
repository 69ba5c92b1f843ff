"""The models of a run by role, and their part in a step.

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
from hone.observe.metrics import Last, Metrics
from hone.observe.ranges import RANGE
from hone.trainer.frozen import FrozenScorer
from hone.trainer.scorer import RowScorer
from hone.trainer.shown_tokens import ShownTokens
from hone.trainer.trainer import Trainer
from hone.types import Column, Row
from hone.weights.parity import ParityGate

__all__ = ["Models"]

Item = TypeVar("Item")


@dataclass(slots=True)
class Models:
    """The trainers and scorers of this process. Passes that the algorithm does not need are not
    made."""

    learners: Mapping[str, Trainer]
    """Trainers of the trained roles, in the order of their updates: `policy`, `critic`."""
    scorers: Mapping[str, RowScorer] = field(default_factory=dict[str, RowScorer])
    """Scorers of the other roles, such as `reference`."""
    parity: ParityGate | None = None
    """Compares the logprobs that engines recorded with the policy's, before the first update."""
    share: Callable[[Mapping[str, Any]], dict[str, Any]] = dict[str, Any]
    """Merges this process's results by name with those of the processes of other roles.
    Collective."""

    @property
    def trainer(self) -> Trainer:
        """The policy's trainer. Raises KeyError in processes that train another model."""
        return self.learners["policy"]

    @property
    def groups(self) -> set[dist.ProcessGroup]:
        """Every group that these models have collectives in."""
        groups = set[dist.ProcessGroup]()
        for trainer in self.learners.values():
            groups |= trainer.mesh.groups
        for scorer in self._frozen.values():
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
        """Make the rows to train from the batch of a step, with all columns that the losses need.
        `version` is that of the policy before this update. `kept` has the outputs of untrained
        roles from an earlier call for the same batch, and receives those of this call. Collective.

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
        """Train on `rows` every role that learns in `step`. Rows of `shown_ids` then have the
        policy's outputs for their tokens as columns. Metrics of the policy begin with `train/`,
        those of another role with `<role>/`. Collective."""
        metrics: Metrics = {}
        shown = ShownTokens(shown_ids) if shown_ids else None
        for role, trainer in self.learners.items():
            if step > algorithm.needs.learns_after.get(role, 0):
                with record_function(f"{RANGE}update {role}"):
                    own = trainer.update(rows, shown if role == "policy" else None)
                prefix = "train/" if role == "policy" else f"{role}/"
                metrics |= {key.replace("train/", prefix): value for key, value in own.items()}
        if (
            shown is not None and "policy" in self.learners
        ):  # after all updates, so that all roles train on equal rows
            shown.add_to(rows, self.trainer.mesh)
        return self.share(metrics | self._memory())

    def _memory(self) -> Metrics:
        """Metrics of each role in this process: GiB on the device between passes, and its
        reductions after out-of-memory errors."""
        held = {role: trainer.device_bytes for role, trainer in self.learners.items()}
        held |= {role: scorer.device_bytes for role, scorer in self._frozen.items()}
        metrics: Metrics = {
            f"mem/{role}_gib": Last(num_bytes / 2**30) for role, num_bytes in held.items()
        }
        for part in self._parts:
            metrics |= part.repair.take_metrics()
        return metrics

    def sleep(self) -> None:
        """Free device memory of all roles for an engine: trained ones by `Trainer.sleep`, frozen
        models in this process by `FrozenScorer.sleep`."""
        for part in self._parts:
            part.sleep()

    def wake(self) -> None:
        """Bring back what `sleep` moved away. Raises as `Policy.wake`."""
        for part in self._parts:
            part.wake()

    @property
    def _parts(self) -> list[Trainer | FrozenScorer]:
        """The models that this process has weights of."""
        return [*self.learners.values(), *self._frozen.values()]

    @property
    def _frozen(self) -> dict[str, FrozenScorer]:
        """The frozen models that this process has weights of, by role."""
        return {r: s for r, s in self.scorers.items() if isinstance(s, FrozenScorer)}

    def _score(
        self, algorithm: Algorithm[Item], rows: Sequence[Row], kept: dict[str, list[Outputs]]
    ) -> None:
        """Add the outputs that the algorithm reads, as columns `<output>/<role>`.

        A trained role is scored where the algorithm asks for it, or where several optimizer steps
        share the rows: with a single step its weights are unchanged when the loss is computed.
        Remote scorers compute at the same time; every process gets the outputs of all.
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
        assert not missing, f"the algorithm needs models that the run does not have: {missing}"
        kept |= {role: outputs for role, outputs in scored.items() if role in self.scorers}
        for role, of_rows in scored.items():
            for row, outputs in zip(rows, of_rows, strict=True):
                row.columns |= {f"{output}/{role}": Column(v) for output, v in outputs.items()}
