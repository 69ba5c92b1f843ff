"""Sums and means over the sequences of a packed row."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["sequence_mean_to_tokens"]


def sequence_mean_to_tokens(values: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """Mean of `values` [N] within each sequence, given back on each of its tokens, [N].

    `sequence_index` [N] says which of the `num_sequences` a token belongs to. Differentiable.
    """
    zeros = values.new_zeros(num_sequences)
    sums = zeros.index_add(0, sequence_index, values)
    counts = zeros.index_add(0, sequence_index, values.detach().new_ones(values.shape))
    return (sums / counts.clamp(min=1)).index_select(0, sequence_index)
