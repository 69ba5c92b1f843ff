"""Means over the sequences of a packed micro-batch.

A sequence is a row. Where an agent rewrote its history, an episode has several rows, and each has a
mean of its own over its trained tokens, as in slime: its tokens have one context, the paths of an
episode have not. The longer an episode is, the less would its mean say of any of its paths, and a
mean over rows that lie in several micro-batches would need another pass through the model. How much
a row counts is another matter: its weight is that of its episode (`rows.row_weights`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["sequence_mean_to_tokens"]


def sequence_mean_to_tokens(values: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """Mean of `values` [N] within each sequence, repeated for each of its tokens, [N].

    `sequence_index` [N] is the sequence of each token, below `num_sequences`. Differentiable.
    """
    zeros = values.new_zeros(num_sequences)
    sums = zeros.index_add(0, sequence_index, values)
    counts = zeros.index_add(0, sequence_index, values.detach().new_ones(values.shape))
    return (sums / counts.clamp(min=1)).index_select(0, sequence_index)
