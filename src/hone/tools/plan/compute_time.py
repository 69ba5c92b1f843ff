"""Time of a device for the passes of training.

    seconds = 3 * Compute(gpu, assumed).forward_s(shape, lengths, num_head_tokens=n)

Products of matrices reach a share of the device's rate that falls with the width of the model: what
lies between them (norms, rotations, activations, residuals) moves bytes in proportion to the width
of a token, where products grow with its square. Attention reaches less, by the length of its
sequences. The constants are fitted to 14 measurements of dense models of 0.6B to 8B, rows of 694 to
131,072 tokens, with and without recomputation, on one and two H200, which they meet within 8 %, and
to layers of Qwen3-30B-A3B on an H100 (benchmarks/README.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hone.config.planning import PlanningConfig
from hone.families.shape import ModelShape
from hone.families.stages import EXPERTS_RATE, RECURRENCE
from hone.hardware import Peaks

__all__ = ["Compute"]

_NARROWNESS = 3.55
"""Width at which products take half of the time, for each FLOP that the device computes while it
moves a byte."""
_OF_DATASHEET = 0.8
"""Share of the data sheet's rate that large products reach: 790 of 989 TFLOP/s on an H100 and an
H200. The rates of these two are measured."""
_ATTENTION = 0.41
"""Rate of FlashAttention 2 over long sequences, forward and backward, as a share of
`plan.training_share`."""
_SHORT = 1000.0
"""Sequence length in tokens at which attention reaches half of that rate."""


@dataclass(frozen=True, slots=True)
class Compute:
    """On one GPU."""

    gpu: Peaks
    assumed: PlanningConfig

    def forward_s(
        self, shape: ModelShape, lengths: ArrayLike, *, num_head_tokens: int | None = None
    ) -> float:
        """Seconds of a forward pass over packed sequences of these lengths; backward takes twice as
        long.

        `num_head_tokens` counts the tokens whose logits are computed; None: all.
        """
        flops = shape.forward_flops(lengths, num_head_tokens=num_head_tokens)
        products = flops - shape.mixing_flops(lengths)
        return self.passes_s(shape, lengths, products, num_attention=1)

    def passes_s(
        self, shape: ModelShape, lengths: ArrayLike, products: float, *, num_attention: int
    ) -> float:
        """Seconds of passes with `products` FLOPs of matrix products in total that compute
        attention and recurrence `num_attention` times."""
        mixing_s = self.attention_s(shape, lengths) + self.recurrence_s(shape, lengths)
        return self.products_s(shape, products) + num_attention * mixing_s

    def products_s(self, shape: ModelShape, flops: float) -> float:
        """Seconds of matrix products of a model of this shape."""
        share = self.assumed.training_share
        share /= 1 + _NARROWNESS * self._rate / self.gpu.bytes_per_s / shape.hidden_size
        if shape.num_experts:
            share *= EXPERTS_RATE
        return flops / (share * self._rate)

    def attention_s(self, shape: ModelShape, lengths: ArrayLike) -> float:
        """Seconds of attention in all layers, for one forward pass."""
        n = np.asarray(lengths, dtype=np.float64)
        keys = shape.visible_keys(n)
        if keys == 0:
            return 0.0
        length = 2 * keys / float(n.sum())  # that a token of a long sequence has behind it
        share = self.assumed.training_share * _ATTENTION / (1 + _SHORT / length)
        return shape.attention_flops_per_key * keys / (share * self._rate)

    def recurrence_s(self, shape: ModelShape, lengths: ArrayLike) -> float:
        """Seconds of the recurrence in all layers, for one forward pass."""
        num_tokens = float(np.asarray(lengths, dtype=np.float64).sum())
        flops = RECURRENCE * shape.recurrence_flops_per_token * num_tokens
        return flops / (self.assumed.training_share * self._rate)

    @property
    def _rate(self) -> float:
        """FLOP/s of large products."""
        is_promised = self.gpu.source == "datasheet"
        return self.gpu.flops_per_s * (_OF_DATASHEET if is_promised else 1.0)
