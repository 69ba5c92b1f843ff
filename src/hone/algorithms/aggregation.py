"""How token losses of one optimizer step become one number.

An aggregation gives each sequence one weight, which all of its trained tokens carry. Weights are
computed once for each optimizer step, over the sequences of all ranks; the loss is then a plain
weighted sum, and no split into micro-batches can change it.

An episode of several rows is one sequence here (`rows.row_weights`).

The configuration takes the values of `algorithm.aggregation` from this file before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

__all__ = ["AGGREGATIONS", "Aggregation"]

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def token_mean(num_trained: Sequence[int], max_completion_tokens: int) -> list[float]:
    """Every token counts the same: `1 / N` (DAPO, arXiv:2503.14476)."""
    del max_completion_tokens
    total = sum(num_trained)
    return [1.0 / total if n else 0.0 for n in num_trained]


def sequence_mean(num_trained: Sequence[int], max_completion_tokens: int) -> list[float]:
    """Mean within each sequence, then over sequences: `1 / (S n_i)` (GRPO, arXiv:2402.03300)."""
    del max_completion_tokens
    num_sequences = sum(1 for n in num_trained if n)
    return [1.0 / (num_sequences * n) if n else 0.0 for n in num_trained]


def constant(num_trained: Sequence[int], max_completion_tokens: int) -> list[float]:
    """Sum over a constant length: `1 / (S L)`, free of length bias (Dr.GRPO, arXiv:2503.20783)."""
    num_sequences = sum(1 for n in num_trained if n)
    return [1.0 / (num_sequences * max_completion_tokens) if n else 0.0 for n in num_trained]


AGGREGATIONS: Mapping[Aggregation, Callable[[Sequence[int], int], list[float]]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "constant": constant,
}
