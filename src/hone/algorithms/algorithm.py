"""What an algorithm is: the rows of what a step collects, their targets, the losses.

    rows = algorithm.rows(batch, version)         # ids, masks, what the engine recorded
    ...                                           # the models that `needs` names score the rows
    metrics = algorithm.targets(rows, batch)      # advantages
    trainer.update(rows)                          # `objectives["policy"]` of each micro-batch

Algorithms are pure functions of tensors: they know no process group, no model and no device.
N are the trained tokens of a micro-batch, S its rows, U its units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torch import Tensor

from hone.config.algorithm import Needs, Output
from hone.observe.metrics import Metrics
from hone.types import LossExtent, MicroBatch, Row

__all__ = ["Algorithm", "Loss", "Objective", "Outputs"]

Outputs = Mapping[Output, Tensor]
"""What a model gives for each trained token: [N] float32 of each output that was asked for."""

Item = TypeVar("Item", contravariant=True)


@dataclass(frozen=True, slots=True)
class Loss:
    """Of a micro-batch. The trainer multiplies values with `MicroBatch.weights` and sums."""

    values: Tensor  # [N], [S] or [U] as `Objective.per` says, with the gradient
    metrics: Metrics = field(default_factory=Metrics)
    """Detached; merged over micro-batches and ranks."""


class Objective(Protocol):
    """What one model is trained on."""

    outputs: frozenset[Output]
    """What the forward computes, with a gradient."""
    outputs_before: frozenset[Output]
    """Outputs of the same model before the update, which rows must have as `<output>/<role>` where
    several optimizer steps are made of them."""
    columns: frozenset[str]
    """Columns that each row must have."""
    per: LossExtent
    """What there is a value of the loss, and a weight, for."""

    def weights(self, rows: Sequence[Row]) -> list[float]:
        """The weight that each row's values carry, of an optimizer step with the rows of all ranks:
        the whole normalisation, so that no cut into micro-batches can change the gradient. A unit
        has that of its first row."""
        ...

    def __call__(self, outputs: Outputs, batch: MicroBatch) -> Loss: ...


class Algorithm(Protocol[Item]):
    """What the loop asks for; it knows none by name. A step collects `Item`s."""

    needs: Needs
    objectives: Mapping[str, Objective]
    """By the role that learns."""

    def rows(self, batch: Sequence[Item], version: int) -> list[Row]:
        """The rows to train, as far as no model is needed. `version` is that of the weights that
        are about to be trained."""
        ...

    def targets(self, rows: list[Row], batch: Sequence[Item]) -> Metrics:
        """Complete the rows of the same batch, once the roles of `needs` have scored them. Rows
        that were made for a score alone are taken out."""
        ...
