"""The gated delta net of a layer in generation: one projection in, the input of `out_proj` out.

`mix_heads` computes it in torch, for prefill, CPUs, and as the reference of
`hone.attention.recurrent.decode_kernel`. Letters: T tokens, C channels of the convolution, W
weights of a channel, H value heads, V size of a value head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from hone.attention.context import PagedContext
from hone.attention.recurrent.layer import DeltaWeights, Projected, mix_projected
from hone.attention.recurrent.mixing import DeltaHeads

__all__ = ["DeltaNet", "mix_heads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """The parameters of a layer's gated delta net between its matrix products; the number of heads
    is that of this rank."""

    layer_idx: int
    heads: DeltaHeads
    conv: Tensor  # [C, 1, W]
    log_rate: Tensor  # [H], `A_log`
    step_bias: Tensor  # [H], `dt_bias`
    norm: Tensor  # [V]
    eps: float

    @classmethod
    def of(cls, module: Any) -> Self:
        """The parameters of a gated delta net of transformers. Numbers of heads follow from the
        sizes of parameters, of which ranks may have shares."""
        num_value_heads, value_dim = len(module.A_log), len(module.norm.weight)
        num_channels, key_dim = len(module.conv1d.weight), module.head_k_dim
        num_keys = num_channels - num_value_heads * value_dim
        return cls(
            layer_idx=module.layer_idx,
            heads=DeltaHeads(
                num_key_heads=num_keys // (2 * key_dim),
                num_value_heads=num_value_heads,
                key_dim=key_dim,
                value_dim=value_dim,
            ),
            conv=module.conv1d.weight,
            log_rate=module.A_log,
            step_bias=module.dt_bias,
            norm=module.norm.weight,
            eps=module.layer_norm_epsilon,
        )


def mix_heads(projected: Tensor, net: DeltaNet, context: PagedContext) -> Tensor:
    """Outputs [T, H * V] of the heads for projected [T, C + H * V + 2 * H]: each token's channels,
    gates of the outputs, b and a. Reads and stores states as the context says."""
    num_heads = net.heads.num_value_heads
    sizes = (len(net.conv), num_heads * net.heads.value_dim, num_heads, num_heads)
    given = Projected(*projected.split(sizes, -1))
    weights = DeltaWeights(net.conv.squeeze(1), net.log_rate, net.step_bias, net.norm)
    return mix_projected(given, weights, net.heads, net, context, eps=net.eps)
