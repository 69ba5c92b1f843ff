"""What a matrix with adapters holds, whatever it is a matrix of."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from hone.models.adapted import AdaptedLayer
from hone.models.nf4 import dequantise, quantise
from hone.models.products import nf4_product
from hone.models.settings import LoraConfig

__all__ = ["LoraLayer"]


class LoraLayer(AdaptedLayer):
    """A frozen matrix, or one of each expert of a layer, with adapters."""

    def __init__(self, weight: Tensor, cfg: LoraConfig) -> None:
        """Take over a parameter [..., out, in]. A and B are zero: `adapt` initialises A, and B
        stays zero, so that the adapted layer begins as the base."""
        super().__init__()
        weight = weight.detach()
        self.shape = tuple(weight.shape)
        self.scaling = cfg.alpha / cfg.rank
        # An attribute of the instance: compiled code guards on where the attribute lies, not only
        # on its value, and would be compiled once more after the first `adapters_off`.
        self.is_on = True
        self.is_4bit = cfg.load_in_4bit
        if self.is_4bit:
            codes, scales = quantise(weight)
            self.register_buffer("codes", codes)
            self.register_buffer("scales", scales)
        else:
            self.weight = nn.Parameter(weight, requires_grad=False)
        *stacked, num_outputs, num_inputs = self.shape
        self.lora_A = nn.Parameter(weight.new_zeros(*stacked, cfg.rank, num_inputs))
        self.lora_B = nn.Parameter(weight.new_zeros(*stacked, num_outputs, cfg.rank))

    def base_weight(self, dtype: torch.dtype) -> Tensor:
        """The frozen weight [..., out, in]."""
        if not self.is_4bit:
            return self.weight
        codes, scales = cast(Tensor, self.codes), cast(Tensor, self.scales)
        return dequantise(codes, scales, self.shape, dtype)

    def nf4_product(self, x: Tensor, ends_E: Tensor | None = None) -> Tensor:
        """What `products.nf4_product` has for `x` and the frozen weight, which is in 4 bits."""
        codes, scales = cast(Tensor, self.codes), cast(Tensor, self.scales)
        return nf4_product(x, codes, scales, self.shape, ends_E)
