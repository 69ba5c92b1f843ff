"""Operations of a decoder layer, one set for each way to run it.

`FusedLayer` says which operations follow each other, `LayerOps` what they are:

    LayerOps             generation, over a paged cache of keys and values
    TensorParallelOps    the same where several ranks share a layer (`hone.models.tensor_parallel`)
    ExactOps             the same in exact mode (`hone.models.exact_decoder`)
    ExactTrainingOps     training in exact mode: packed rows and gradients

They differ in their products, sums and attention. What runs in between are the kernels of
`hone.models.layer_kernels`, or `TorchKernels`, their reference implementation.

Letters: T packed tokens, D model and head size, H heads, I the MLP's inner size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.attention import PagedContext
from hone.attention.backends import write_kv
from hone.attention.interface import attend_paged
from hone.models.cpu_products import linear
from hone.models.int8_rows import is_packed, unpack_rows

if TYPE_CHECKING:
    from hone.attention.recurrent.delta_net import DeltaNet
    from hone.models.experts import Experts, Record

__all__ = [
    "Heads",
    "LayerOps",
    "Mlp",
    "Norm",
    "Projection",
    "TorchKernels",
    "choose_kernels",
    "merge_rows",
]


def merge_rows(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor of which the parameters, stacked along their rows, are views from now on.

    They keep their identity and values, so optimizers, hooks and exports see no difference, and
    what is written into them is in the result. Parameters that are adjacent already stay there.
    """
    first = parameters[0]
    sizes = [len(parameter) for parameter in parameters]
    shape = (sum(sizes), *first.shape[1:])
    ends = [parameter.data_ptr() + parameter.nbytes for parameter in parameters]
    storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    # A parameter made outside inference mode must not get a tensor of that mode: it could not be
    # trained. Nor the other way round.
    with torch.inference_mode(first.is_inference()), torch.no_grad():
        if len(storages) == 1 and ends[:-1] == [p.data_ptr() for p in parameters[1:]]:
            return first.detach().as_strided(shape, first.stride())
        merged = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, rows in zip(parameters, merged.split(sizes), strict=True):
            parameter.data = rows
    return merged


class Projection(NamedTuple):
    """A linear layer, or several that read the same input: weight [out, in] and bias [out]. The
    weight may be packed (`hone.models.int8_rows`)."""

    weight: Tensor
    bias: Tensor | None
    parts: tuple[nn.Linear, ...] = ()
    """The layers whose parameters are rows of weight and bias, if there are several."""

    @classmethod
    def of(cls, linear: nn.Linear, *others: nn.Linear) -> Self:
        """The projection with the outputs of all layers, one after the other; merges their
        parameters."""
        if not others:
            return cls(linear.weight, linear.bias)
        linears = (linear, *others)
        has_bias = cast(nn.Parameter | None, linear.bias) is not None
        bias = merge_rows([linear.bias for linear in linears]) if has_bias else None
        return cls(merge_rows([linear.weight for linear in linears]), bias, linears)


class Mlp(NamedTuple):
    """The MLP of a layer: [gate; up], then down."""

    gate_up: Projection
    down: Projection

    @classmethod
    def of(cls, module: Any) -> Self:
        """Build from `module`; merges its gate and up parameters."""
        return cls(Projection.of(module.gate_proj, module.up_proj), Projection.of(module.down_proj))


class Norm(NamedTuple):
    """A root mean square norm of rows."""

    weight: Tensor
    eps: float
    zero_centred: bool = False
    """True: rows are multiplied by 1 + weight in float32, and rounded once. False: they are rounded
    before and after they are multiplied by the weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The attention of a layer; the number of heads is that of this rank."""

    layer_index: int
    num_heads: int
    head_dim: int
    scale: float
    window: int | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    zero_centred: bool = False
    """Whether the norms of queries and keys multiply by 1 + weight; see `Norm`."""
    gated: bool = False
    """Whether each query is followed by a gate of the head's output."""


class LayerOps:
    """The operations of `FusedLayer` in generation, whose context is a `PagedContext`."""

    rank: int = 0
    """Rank among those that share a layer."""

    def __init__(self, kernels: TorchKernels) -> None:
        self.kernels = kernels

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Rows of x [T, D] over their root mean square, times a weight [D]."""
        return self.kernels.rms_norm(x, *norm)

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Norm of residual + x, and this sum, both [T, D]; may write the sum into `residual`.

        x is the result of `sum_linear`. If ranks share heads and inner size it is a rank's partial
        sum, and only here are the parts added up.
        """
        return self.kernels.add_rms_norm(x, residual, *norm), residual

    def linear(self, x: Tensor, projection: Projection) -> Tensor:
        """Rows of x [T, in], projected: [T, out]."""
        return self.kernels.linear(x, projection.weight, projection.bias)

    def sum_linear(self, x: Tensor, projection: Projection) -> Tensor:
        """`linear`, in any form that `add_rms_norm` can add to the residual."""
        return self.kernels.sum_linear(x, projection.weight, projection.bias)

    def gated_linear(self, x: Tensor, projection: Projection) -> Tensor:
        """silu(gate) * up, [T, I], of the outputs [gate; up] of `linear`."""
        return self.kernels.gated_linear(x, projection.weight, projection.bias)

    def sum_experts(self, x: Tensor, experts: Experts, shared: Mlp | None, context: Any) -> Tensor:
        """Sum of the outputs of each token's experts, and of the `shared` MLP if there is one, for
        x [T, D], in any form that `add_rms_norm` can add to the residual. Records the chosen
        experts if the context asks for it."""
        is_recorded = context.routes is not None
        record = partial(context.record_routes, experts.layer) if is_recorded else None
        beside = None
        if shared is not None:
            inner = self.gated_linear(x, shared.gate_up)
            beside = self.linear(inner, shared.down)
        return self.kernels.sum_experts(x, experts, beside, record)

    def attend(
        self, qkv: Tensor, heads: Heads, positions: Tensor, rotary: Tensor, context: Any
    ) -> Tensor:
        """Attention of the heads in qkv [T, Hq + 2 Hkv, D], once normed and rotated: [T, Hq, D].
        Gated heads have [T, 2 Hq + 2 Hkv, D], each query followed by its gate.

        `rotary` is a `RotaryTable`'s. Keys and values are stored where the context has a cache.
        """
        scales = context.kv_scales
        # A calibrating attention sets the scales first, and stores keys and values itself.
        stores = not context.calibrate
        q, k, v = self.kernels.rotate_heads(
            qkv,
            positions,
            rotary,
            q_norm=heads.q_norm,
            k_norm=heads.k_norm,
            eps=heads.eps,
            num_heads=heads.num_heads,
            kv_cache=context.kv_caches[heads.layer_index] if stores else None,
            slot_mapping=context.slot_mapping,
            kv_scales=None if scales is None else scales[heads.layer_index],
            zero_centred=heads.zero_centred,
            gated=heads.gated,
        )
        attended = self.attend_rotated(q, k, v, heads, context, write=not stores)
        return self.kernels.gate_heads(attended, qkv) if heads.gated else attended

    def attend_rotated(
        self, q: Tensor, k: Tensor, v: Tensor, heads: Heads, context: PagedContext, *, write: bool
    ) -> Tensor:
        """Attention of queries [T, H, D], that first stores keys and values where `write`."""
        options: dict[str, Any] = {"scale": heads.scale, "window": heads.window, "write": write}
        return attend_paged(q, k, v, heads.layer_index, context, **options)

    def mix_heads(self, projected: Tensor, net: DeltaNet, context: PagedContext) -> Tensor:
        """Gated linear attention of projected [T, C + H * V + 2 * H], as
        `hone.attention.recurrent.delta_net.mix_heads`: [T, H * V]."""
        return self.kernels.mix_heads(projected, net, context)

    def num_positions(self, context: Any) -> int:
        """Number of positions that the tokens of a forward reach."""
        return context.max_context_len


def choose_kernels(device: torch.device) -> TorchKernels:
    """Choose Triton kernels on CUDA, else torch's."""
    if device.type == "cuda" and find_spec("triton"):
        from hone.models import layer_kernels  # needs triton, absent on CPUs

        return cast(TorchKernels, layer_kernels)  # functions of the same signatures
    return TorchKernels()


class TorchKernels:
    """Reference implementations of `hone.models.layer_kernels` in torch."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, zero_centred: bool = False) -> Tensor:
        return _normed(x, weight, eps, zero_centred=zero_centred)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centred: bool = False
    ) -> Tensor:
        return _normed(residual.add_(x), weight, eps, zero_centred=zero_centred)

    def rotate_heads(
        self,
        qkv: Tensor,
        positions: Tensor,
        rotary: Tensor,
        *,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        num_heads: int,
        kv_cache: Tensor | None = None,
        slot_mapping: Tensor | None = None,
        kv_scales: Tensor | None = None,
        zero_centred: bool = False,
        gated: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if gated:
            queries, others = qkv.tensor_split((2 * num_heads,), 1)
            qkv = torch.cat((queries[:, ::2], others), 1)
        num_kv_heads = (qkv.shape[1] - num_heads) // 2
        heads, v = qkv.split((num_heads + num_kv_heads, num_kv_heads), 1)
        if q_norm is not None and k_norm is not None:
            weights = (q_norm.expand(num_heads, -1), k_norm.expand(num_kv_heads, -1))
            heads = _normed(heads, torch.cat(weights), eps, zero_centred=zero_centred)
        cos, sin = rotary[positions].unsqueeze(1).chunk(2, -1)
        half = cos.shape[-1]
        x, y, rest = heads.split((half, half, heads.shape[-1] - 2 * half), -1)
        rotated = torch.cat((x * cos - y * sin, y * cos + x * sin, rest), -1)
        q, k = rotated.split((num_heads, num_kv_heads), 1)
        if kv_cache is not None and slot_mapping is not None:
            write_kv(k, v, kv_cache, slot_mapping, kv_scales)
        return q, k, v

    def gate_heads(self, x: Tensor, qkv: Tensor) -> Tensor:
        return x * qkv[:, 1 : 2 * x.shape[1] : 2].sigmoid()

    def mix_heads(self, projected: Tensor, net: DeltaNet, context: PagedContext) -> Tensor:
        from hone.attention.recurrent.delta_net import mix_heads

        return mix_heads(projected, net, context)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, unpack_rows(weight, x.dtype) if is_packed(weight) else weight, bias)

    sum_linear = linear

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.silu_mul(self.linear(x, weight, bias))

    def sum_experts(
        self, x: Tensor, experts: Experts, beside: Tensor | None = None, record: Record = None
    ) -> Tensor:
        total = experts.sum_up(x, record)
        return total if beside is None else total + beside


def _normed(x: Tensor, weight: Tensor, eps: float, *, zero_centred: bool) -> Tensor:
    """x over its root mean square along the last dimension, computed in float32, times weight."""
    normalized = F.rms_norm(x.float(), x.shape[-1:], None, eps)
    if zero_centred:
        return (normalized * (1.0 + weight.float())).to(x.dtype)
    return weight * normalized.to(x.dtype)
