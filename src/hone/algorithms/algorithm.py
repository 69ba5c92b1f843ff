"""What an algorithm is: the rows of groups, their targets, and an objective for what learns.

    rows = algorithm.rows(groups, version)        # ids, masks, what the engine recorded
    ...                                           # the models that `needs` names score the rows
    algorithm.targets(rows, groups)               # advantages
    trainer.update(rows)                          # `objectives["policy"]` of each micro-batch

Algorithms are pure functions of tensors: they know no process group, no model and no device.
N are the trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from hone.config.algorithm import Needs
from hone.observe.metrics import Metrics
from hone.types import Group, MicroBatch, Trajectory

__all__ = ["Algorithm", "Objective", "Output", "TokenLoss", "TokenOutputs"]

Output = Literal["logprobs", "entropy"]
"""What a model gives for each trained token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutputs:
    """Of the model in training, in the order of the micro-batch's trained tokens."""

    logprobs: Tensor  # [N] float32
    entropy: Tensor | None = None  # [N] float32, where the objective asks for it


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss of each trained token. The trainer multiplies with the tokens' weights and sums."""

    values: Tensor  # [N], with the gradient
    metrics: Metrics = field(default_factory=Metrics)
    """Detached; merged over micro-batches and ranks."""


class Objective(Protocol):
    """What one model is trained on."""

    outputs: frozenset[Output]
    """What the forward computes, with a gradient."""
    columns: frozenset[str]
    """Fields that each row must have."""

    def weights(self, rows: Sequence[Trajectory]) -> list[float]:
        """One weight a row of an optimizer step, of all ranks, which each of its trained tokens
        carries: the whole normalisation. No cut into micro-batches can change the gradient."""
        ...

    def __call__(self, outputs: TokenOutputs, batch: MicroBatch) -> TokenLoss: ...


class Algorithm(Protocol):
    """What the loop asks for; it knows none by name."""

    needs: Needs
    objectives: Mapping[str, Objective]
    """By the role that learns."""

    def rows(self, groups: Sequence[Group], version: int) -> list[Trajectory]:
        """One row for each valid sample, in order, as far as no model is needed. `version` is that
        of the weights that are about to be trained."""
        ...

    def targets(self, rows: Sequence[Trajectory], groups: Sequence[Group]) -> None:
        """Complete `rows` of the same groups, once the roles of `needs` have scored them."""
        ...
