"""The interface of an algorithm: rows of a step, their training targets, and losses.

    rows = algorithm.rows(batch, version)         # token ids, masks, log-probs of the engine
    ...                                           # the models that `needs` names score the rows
    metrics = algorithm.targets(rows, batch)      # advantages
    trainer.update(rows)                          # `objectives["policy"]` of each micro-batch

Algorithms are pure functions of tensors: they know no process group, no model and no device.
Shapes: N trained tokens of a micro-batch, S rows, U units (a pair of rows is one unit).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torch import Tensor

from hone.algorithms.settings import Needs, Output
from hone.observe.metrics import Metrics
from hone.types import LossExtent, MicroBatch, Row

__all__ = ["Algorithm", "Loss", "Objective", "Outputs"]

Outputs = Mapping[Output, Tensor]
"""The requested outputs of a model by name, with one entry for each trained token; see `Output`
for shapes and dtypes."""

Item = TypeVar("Item", contravariant=True)


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a micro-batch: the sum of `values` times `MicroBatch.weights`, which the trainer
    takes."""

    values: Tensor  # [N], [S] or [U] as `Objective.per` says, with the gradient
    metrics: Metrics = field(default_factory=Metrics)
    """Detached; merged over micro-batches and ranks."""


class Objective(Protocol):
    """The training objective of one model."""

    outputs: frozenset[Output]
    """Outputs that the forward pass computes, with a gradient."""
    outputs_before: frozenset[Output]
    """Outputs of the same model before the update. Rows must have them as columns
    `<output>/<role>` when several optimizer steps train on the same rollout."""
    columns: frozenset[str]
    """Columns that each row must have."""
    per: LossExtent
    """Whether there is one loss value, and one weight, for each trained token, row or unit."""

    def weights(self, rows: Sequence[Row]) -> list[float]:
        """The weight of each row's loss values; `rows` are all rows of an optimizer step.

        The weights are the whole normalisation, so no split into micro-batches changes the
        gradient. A unit takes the weight of its first row.
        """
        ...

    def __call__(self, outputs: Outputs, batch: MicroBatch) -> Loss: ...


class Algorithm(Protocol[Item]):
    """The interface that the training loop calls; the loop knows no algorithm by name. `Item` is
    the type of what a step collects."""

    needs: Needs
    objectives: Mapping[str, Objective]
    """Objectives by the role that is trained."""

    def rows(self, batch: Sequence[Item], version: int) -> list[Row]:
        """The rows to train, before any model has scored them. `version` is that of the weights
        about to be trained."""
        ...

    def targets(self, rows: list[Row], batch: Sequence[Item]) -> Metrics:
        """Add the targets to the rows of `batch`, after the roles of `needs` have scored them. Rows
        that were made only to be scored are removed from `rows`."""
        ...
