"""Supervised fine-tuning: the cross-entropy of demonstrations."""

from __future__ import annotations

from collections.abc import Sequence

from hone.algorithms.aggregation import AGGREGATIONS
from hone.algorithms.algorithm import Output, TokenLoss, TokenOutputs
from hone.types import MicroBatch, Trajectory

__all__ = ["CrossEntropy"]


class CrossEntropy:
    """Mean over the trained tokens of an optimizer step, in nats. Implements `Objective`."""

    outputs: frozenset[Output] = frozenset({"logprobs"})
    columns: frozenset[str] = frozenset()

    def weights(self, rows: Sequence[Trajectory]) -> list[float]:
        return AGGREGATIONS["token_mean"]([row.num_trained for row in rows], 0)

    def __call__(self, outputs: TokenOutputs, batch: MicroBatch) -> TokenLoss:
        del batch
        return TokenLoss(-outputs.logprobs)
