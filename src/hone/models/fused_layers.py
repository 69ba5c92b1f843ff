"""Decoder layers of known families as few, large operations, for generation.

The layers of Llama, Mistral, Qwen2 and Qwen3 are one skeleton. Here it runs over the model's own
parameters as

    x = norm(residual)        qkv = x @ [q; k; v]        norm and rotate heads, store k and v
    x = attention @ o         residual += x              x = norm(residual)
    x = silu(gate) * up       with [gate; up] = x @ ...  residual += x @ down

which is eight or nine kernels a layer on CUDA. Projections that read the same input are merged
without a copy: their parameters become adjacent views of one tensor. Between the products run the
kernels of `hone.models.layer_kernels`, or their twins below where there is no Triton.

Letters: T packed tokens, D model and head size, H heads, I the MLP's inner size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hone.attention import PagedContext
from hone.attention.backends import write_kv
from hone.attention.interface import attend_paged
from hone.families.registry import SPECS

if TYPE_CHECKING:
    from hone.models.tensor_parallel import TensorParallel

__all__ = ["FusedDecoder", "is_fusible", "merge_rows", "places_of", "require_places"]

MIN_POSITIONS = 1024
"""Rows of the smallest table of rotary embeddings."""

MERGED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def is_fusible(model: PreTrainedModel) -> bool:
    """Whether `FusedDecoder` computes what `model` does.

    It does for the very classes of transformers, with plain linear layers of one dtype on one
    device. A subclass, or a model with anything put into it, may compute something else.
    """
    spec = SPECS[model.config.model_type]
    if spec.decode is None or model.config.hidden_act != "silu":
        return False
    expected = spec.decode.classes(head_norms=spec.head_norms)
    found = {
        (".".join("*" if part.isdigit() else part for part in name.split(".")), _path(type(module)))
        for name, module in model.base_model.named_modules()
        if not name.endswith("mlp.act_fn")  # its class follows from `hidden_act`
    }
    return (
        found == set(expected.items())
        and len({(p.dtype, p.device) for p in model.parameters()}) == 1
    )


def _path(kind: type[nn.Module]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


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


def places_of(parameters: Iterable[Tensor]) -> list[tuple[Tensor, int]]:
    """Parameters, and where they lie now; for `require_places`."""
    return [(parameter, parameter.data_ptr()) for parameter in parameters]


def require_places(places: Iterable[tuple[Tensor, int]]) -> None:
    """Raise RuntimeError unless the parameters lie where they lay."""
    if any(parameter.data_ptr() != place for parameter, place in places):
        raise RuntimeError(
            "parameters of the model have been moved since generation was set up, so that it "
            "would go on with their old values: write into parameters in place (copy_), or "
            "call generation_model again"
        )


class Projection(NamedTuple):
    """A linear layer, or several that read the same input: weight [out, in] and bias [out]."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, linear: nn.Linear, *others: nn.Linear) -> Self:
        """The outputs of all layers, one after the other; merges their parameters."""
        if not others:
            return cls(linear.weight, linear.bias)
        linears = (linear, *others)
        has_bias = cast(nn.Parameter | None, linear.bias) is not None
        bias = merge_rows([linear.bias for linear in linears]) if has_bias else None
        return cls(merge_rows([linear.weight for linear in linears]), bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedLayer:
    """One decoder layer over the parameters of a module of transformers.

    The numbers of heads are those that the projections produce here.
    """

    index: int
    num_heads: int
    head_dim: int
    scale: float
    window: int | None
    eps: float
    qkv: Projection
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection
    next_norm: Tensor
    """Weight of the norm that follows: the next layer's first, or the decoder's last."""
    ops: LayerOps

    @classmethod
    def of(cls, module: Any, next_norm: Tensor, window: int | None, ops: LayerOps) -> Self:
        """The layer that computes what the decoder layer `module` does; merges its parameters."""
        attention, mlp = module.self_attn, module.mlp
        return cls(
            index=attention.layer_idx,
            num_heads=attention.q_proj.out_features // attention.head_dim,
            head_dim=attention.head_dim,
            scale=attention.scaling,
            window=window,
            eps=attention.config.rms_norm_eps,
            qkv=Projection.of(attention.q_proj, attention.k_proj, attention.v_proj),
            q_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
            k_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
            o=Projection.of(attention.o_proj),
            mlp_norm=module.post_attention_layernorm.weight,
            gate_up=Projection.of(mlp.gate_proj, mlp.up_proj),
            down=Projection.of(mlp.down_proj),
            next_norm=next_norm,
            ops=ops,
        )

    def without_biases_of_sums(self) -> Self:
        """The layer of a rank that leaves it to the first one to add the biases of o and down."""
        o, down = (projection._replace(bias=None) for projection in (self.o, self.down))
        return replace(self, o=o, down=down)

    def __call__(
        self, x: Tensor, residual: Tensor, positions: Tensor, rotary: Tensor, context: PagedContext
    ) -> Tensor:
        """From the normed residual x [T, D] to that of the next layer; adds to residual [T, D]."""
        # Where ranks share the heads and the inner size, `attended` and `x` after the MLP are a
        # rank's part of a sum: these two are all that has to be added up among the ranks.
        attended = self._attend(x, positions, rotary, context)
        x = self.ops.add_rms_norm(attended, residual, self.mlp_norm, self.eps)
        x = self.sum_linear(self.gated_linear(x, self.gate_up), self.down)
        return self.ops.add_rms_norm(x, residual, self.next_norm, self.eps)

    def _attend(
        self, x: Tensor, positions: Tensor, rotary: Tensor, context: PagedContext
    ) -> Tensor:
        scales = context.kv_scales
        # Scales that are yet to be found are found by the attention, which then stores as well.
        stores = not context.calibrate
        q, k, v = self.ops.rotate_heads(
            self.linear(x, self.qkv).view(len(x), -1, self.head_dim),
            positions,
            rotary,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            eps=self.eps,
            num_heads=self.num_heads,
            kv_cache=context.kv_caches[self.index] if stores else None,
            slot_mapping=context.slot_mapping,
            kv_scales=None if scales is None else scales[self.index],
        )
        output = self.attend_paged(q, k, v, context, write=not stores)
        return self.sum_linear(output.flatten(1), self.o)

    def linear(self, x: Tensor, projection: Projection) -> Tensor:
        """Rows of x [T, in], projected: [T, out]."""
        return self.ops.linear(x, *projection)

    def sum_linear(self, x: Tensor, projection: Projection) -> Tensor:
        """As `linear`, in any form that `add_rms_norm` adds to the residual."""
        return self.ops.sum_linear(x, *projection)

    def gated_linear(self, x: Tensor, projection: Projection) -> Tensor:
        """silu(gate) * up of the outputs of `linear`."""
        return self.ops.gated_linear(x, *projection)

    def attend_paged(
        self, q: Tensor, k: Tensor, v: Tensor, context: PagedContext, *, write: bool
    ) -> Tensor:
        """Attention of queries [T, H, D], which first stores keys and values if told to `write`."""
        return attend_paged(
            q,
            k,
            v,
            self.index,
            context,
            scale=self.scale,
            window=self.window,
            softcap=None,
            write=write,
        )


class FusedDecoder:
    """The backbone of a model that `is_fusible`, from token ids to the final norm."""

    def __init__(
        self,
        model: PreTrainedModel,
        tp: TensorParallel | None = None,
        *,
        layer: type[FusedLayer] = FusedLayer,
    ) -> None:
        """Merges parameters of `model` in place, one layer at a time, and makes a `layer` of each.

        With `tp`, the layers hold one rank's part of the weights, as `shard_model` makes them.
        """
        base: Any = model.base_model
        self._ops = _layer_ops(model.device)
        if tp is not None:
            width: int = model.config.hidden_size
            self._ops = tp.layer_ops(self._ops, width=width, dtype=model.dtype)
        self._embedding: Tensor = base.embed_tokens.weight
        self._rotary = RotaryTable(base.rotary_emb, dtype=model.dtype, device=model.device)
        self._eps: float = model.config.rms_norm_eps
        norms = [layer.input_layernorm.weight for layer in base.layers]
        self._first_norm: Tensor
        self._first_norm, *next_norms = (*norms, base.norm.weight)
        windows = SPECS[model.config.model_type].layer_windows(model.config.to_dict())
        self.layers = [
            layer.of(module, next_norm, window, self._ops)
            for module, next_norm, window in zip(base.layers, next_norms, windows, strict=True)
        ]
        if tp is not None and tp.rank > 0:
            self.layers = [layer.without_biases_of_sums() for layer in self.layers]
        # The parameters that the layers do not hold themselves, and where they must stay.
        self._places = places_of(
            parameter
            for layer in base.layers
            for name, parameter in layer.named_parameters()
            if name.split(".")[1] in MERGED
        )
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # where the merged parameters lay before

    def __call__(self, input_ids: Tensor, position_ids: Tensor, context: PagedContext) -> Tensor:
        """Hidden states [T, D] of ids [T] at positions [T], both int64.

        Raises RuntimeError where parameters have been moved since they were merged.
        """
        self._check_places()
        residual = F.embedding(input_ids, self._embedding)
        rotary = self._rotary.rows(context.max_context_len)
        x = self._ops.rms_norm(residual, self._first_norm, self._eps)
        for layer in self.layers:
            x = layer(x, residual, position_ids, rotary, context)
        return x

    def _check_places(self) -> None:
        require_places(self._places)


class RotaryTable:
    """Rotary embeddings of positions, computed once by the model's own module.

    Rows hold the D / 2 cosines and D / 2 sines of a position, 16 MiB for 65,536 positions of 128
    16-bit numbers. The table reaches as far as has been asked for, doubling; graphs may hold the
    former ones, which are kept.
    """

    def __init__(self, module: nn.Module, *, dtype: torch.dtype, device: torch.device) -> None:
        self._module = module
        self._example = torch.empty(0, dtype=dtype, device=device)  # tells the module both
        self._tables: list[Tensor] = []

    def rows(self, count: int) -> Tensor:
        """A table [P, D] of at least the first `count` positions.

        Raises RuntimeError where a graph is being recorded that needs a longer table than there is.
        """
        if not self._tables or len(self._tables[-1]) < count:
            if self._example.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"the rotary embeddings of {count} positions must be computed before a graph "
                    "is recorded that reads them: run the forward once with the same context"
                )
            self._tables.append(self._compute(max(MIN_POSITIONS, 1 << (count - 1).bit_length())))
        return self._tables[-1]

    @torch.no_grad()
    def _compute(self, count: int) -> Tensor:
        positions = torch.arange(count, device=self._example.device).unsqueeze(0)
        halves = [x[0].chunk(2, -1)[0] for x in self._module(self._example, positions)]
        return torch.cat(halves, -1)


class LayerOps(Protocol):
    """What a layer is made of, attention apart; `hone.models.layer_kernels` says what they take."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor: ...

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
        kv_cache: Tensor | None,
        slot_mapping: Tensor | None,
        kv_scales: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def sum_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...


def _layer_ops(device: torch.device) -> LayerOps:
    if device.type == "cuda" and find_spec("triton"):
        from hone.models import layer_kernels  # needs triton, absent on CPUs

        return layer_kernels
    return TorchOps()


class TorchOps:
    """The operations of `hone.models.layer_kernels` in torch."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return weight * _normalized(x, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return weight * _normalized(residual.add_(x), eps)

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
        kv_cache: Tensor | None,
        slot_mapping: Tensor | None,
        kv_scales: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_kv_heads = (qkv.shape[1] - num_heads) // 2
        heads, v = qkv.split((num_heads + num_kv_heads, num_kv_heads), 1)
        if q_norm is not None and k_norm is not None:
            weights = (q_norm.expand(num_heads, -1), k_norm.expand(num_kv_heads, -1))
            heads = torch.cat(weights) * _normalized(heads, eps)
        cos, sin = rotary[positions].unsqueeze(1).chunk(2, -1)
        x, y = heads.chunk(2, -1)
        rotated = torch.cat((x * cos - y * sin, y * cos + x * sin), -1)
        q, k = rotated.split((num_heads, num_kv_heads), 1)
        if kv_cache is not None and slot_mapping is not None:
            write_kv(k, v, kv_cache, slot_mapping, kv_scales)
        return q, k, v

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    sum_linear = linear

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.silu_mul(F.linear(x, weight, bias))


def _normalized(x: Tensor, eps: float) -> Tensor:
    """x over its root mean square along the last dimension, computed in float32."""
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)
