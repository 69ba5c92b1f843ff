"""Supervised fine-tuning: the cross-entropy of demonstrations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hone.algorithms.aggregation import AGGREGATIONS
from hone.algorithms.algorithm import Loss, Objective, Outputs
from hone.algorithms.settings import Needs, Output
from hone.observe.metrics import Metrics
from hone.types import LossExtent, MicroBatch, Row

__all__ = ["SFT", "CrossEntropy"]


class SFT:
    """Supervised fine-tuning. Implements `Algorithm`; demonstrations are rows already."""

    def __init__(self) -> None:
        self.needs = Needs()
        self.objectives: Mapping[str, Objective] = {"policy": CrossEntropy()}

    def rows(self, batch: Sequence[Row], version: int) -> list[Row]:
        del version
        return list(batch)

    def targets(self, rows: Sequence[Row], batch: Sequence[Row]) -> Metrics:
        del rows, batch
        return {}


class CrossEntropy:
    """Mean over the trained tokens of an optimizer step, in nats. Implements `Objective`."""

    outputs: frozenset[Output] = frozenset({"logprobs"})
    outputs_before: frozenset[Output] = frozenset()
    columns: frozenset[str] = frozenset()
    per: LossExtent = "trained"

    def weights(self, rows: Sequence[Row]) -> list[float]:
        return AGGREGATIONS["token_mean"]([row.num_trained for row in rows], 0)

    def __call__(self, outputs: Outputs, batch: MicroBatch) -> Loss:
        del batch
        return Loss(-outputs["logprobs"])
