"""The ranks that compute a model together; in this base case, one rank with the whole model.

`hone.models.tensor_parallel.TensorParallel` is the case of several ranks, each with a part.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hone.models.layer_ops import LayerOps, TorchKernels

__all__ = ["ModelRanks"]


class ModelRanks:
    """A group of one rank on `device`, whose exchanges do nothing."""

    rank = 0
    size = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def gather_columns(self, x: Tensor) -> Tensor:
        """Concatenate the columns of x [N, C] float32 of all ranks, in rank order: [N, size *
        C]."""
        return x

    def smallest(self, value: int) -> int:
        """The smallest of all ranks' values, so that all ranks decide by the same number."""
        return value

    def layer_ops(self, kernels: TorchKernels, *, width: int, dtype: torch.dtype) -> LayerOps:
        """Operations for layers with this rank's shards, over rows of `width` values of `dtype`.
        Collective if the group has several ranks."""
        return LayerOps(kernels)

    def check_divides(self, config: PreTrainedConfig) -> None:
        """Raise ValueError for a family without tensor parallelism, or sizes that the number of
        ranks does not divide."""

    def shard_of(self, name: str, tensor: Tensor, config: PreTrainedConfig) -> Tensor:
        """The part of a full weight that this rank holds: where it lies together a view of
        `tensor`, or `tensor` itself. `name` is the weight's in the checkpoint; `config` is that of
        the whole model or of a rank."""
        return tensor

    def shard_model(self, model: PreTrainedModel) -> PreTrainedModel:
        """The model with this rank's parts of the weights, on its device; `model` itself with one
        rank."""
        return model

    def fit(self, model: PreTrainedModel) -> None:
        """Adapt a model's sizes to weights that are this rank's parts."""

    def divide_layers(self, model: PreTrainedModel) -> None:
        """Replace transformers' layers of `model`, which have this rank's weights, by layers that
        compute together with all ranks, in place."""
