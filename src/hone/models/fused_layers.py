"""Decoder layers of known families as few, large operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hone.attention.context import ContentFeatures
from hone.families.registry import spec_of
from hone.models.contents import add_deepstack, embed_contents
from hone.models.int8_rows import is_packed
from hone.models.layer_ops import Heads, LayerOps, Mlp, Norm, Projection

if TYPE_CHECKING:
    from hone.attention.recurrent.delta_net import DeltaNet
    from hone.models.experts import Experts

__all__ = [
    "FusedDecoder",
    "FusedLayer",
    "RotaryTable",
    "addresses_of",
    "is_fusible",
    "merge_projections",
    "require_addresses",
]

MIN_POSITIONS = 1024
"""Smallest size of the table of rotary embeddings, in positions."""

MERGED = (
    "q_proj",
    "k_proj",
    "v_proj",
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_b",
    "in_proj_a",
    "gate_proj",
    "up_proj",
)


def is_fusible(model: PreTrainedModel) -> bool:
    """Whether `FusedDecoder` computes the same as `model`.

    It does for exactly the supported classes of transformers, with plain linear layers of one dtype
    on one device, or packed ones (`hone.models.int8_rows`) among others of one dtype. A subclass,
    or a modified model, may compute something else.
    """
    spec = spec_of(model.config.model_type)
    if spec.decode is None or model.config.hidden_act != "silu":
        return False
    config = model.config.to_dict()
    layers = spec.recurrent_layers(config)
    num_recurrent = 0 if layers is None else len(layers.indices)
    classes = spec.decode.classes(
        head_norms=spec.has_head_norms(config),
        has_attention=num_recurrent < config["num_hidden_layers"],
        has_recurrence=num_recurrent > 0,
    )
    always = set(classes.items())
    mlps = spec.decode.mlp_classes(spec.experts)
    found = {
        (".".join("*" if part.isdigit() else part for part in name.split(".")), _path(type(module)))
        for name, module in model.base_model.named_modules()
        if not name.endswith(".act_fn")  # its class follows from `hidden_act`
    }
    is_known = always <= found <= always | mlps
    plain = {(p.dtype, p.device) for p in model.parameters() if not is_packed(p)}
    return is_known and len(plain) == 1


def _path(kind: type[nn.Module]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def addresses_of(parameters: Iterable[Tensor]) -> list[tuple[Tensor, int]]:
    """Parameters with their current addresses, for `require_addresses`."""
    return [(parameter, parameter.data_ptr()) for parameter in parameters]


def require_addresses(addresses: Iterable[tuple[Tensor, int]]) -> None:
    """Raise RuntimeError if a parameter has moved in memory."""
    if any(parameter.data_ptr() != address for parameter, address in addresses):
        raise RuntimeError(
            "parameters of the model have been moved since generation was set up, so that it "
            "would go on with their old values: write into parameters in place (copy_), or "
            "call generation_model again"
        )


def merge_projections(model: PreTrainedModel) -> None:
    """Merge the parameters of an `is_fusible` model in place, as `FusedDecoder` does."""
    base: Any = model.base_model
    for layer in base.layers:
        _projection_of(layer)
        mlp = _mlp_of(layer)
        if mlp is not None:
            Mlp.of(mlp)


def _projection_of(layer: Any) -> Projection:
    """The first projection of a decoder layer of transformers; merges its parameters."""
    if hasattr(layer, "linear_attn"):
        net = layer.linear_attn
        return Projection.of(net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a)
    attention = layer.self_attn
    return Projection.of(attention.q_proj, attention.k_proj, attention.v_proj)


def _mlp_of(layer: Any) -> nn.Module | None:
    """The MLP of a decoder layer of transformers: the whole module, or the shared experts."""
    if not hasattr(layer.mlp, "experts"):
        return layer.mlp
    return getattr(layer.mlp, "shared_experts", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedLayer:
    """One decoder layer over the parameters of a transformers module."""

    heads: Heads | DeltaNet
    """Attention, or gated linear attention."""
    qkv: Projection
    """All that the heads read."""
    o: Projection
    mlp_norm: Norm
    mlp: Mlp | None
    """The MLP of all tokens; in layers with experts the shared experts."""
    experts: Experts | None
    next_norm: Norm
    """The norm that follows: the next layer's first, or the decoder's last."""
    ops: LayerOps

    @classmethod
    def of(
        cls,
        module: Any,
        next_norm: Norm,
        window: int | None,
        ops: LayerOps,
        expert_layer: int | None = None,
    ) -> Self:
        """The fused layer of decoder layer `module`; merges its parameters. `expert_layer` is its
        position among the layers with experts, None for a layer with an MLP."""
        mlp = _mlp_of(module)
        if hasattr(module, "linear_attn"):
            from hone.attention.recurrent.delta_net import DeltaNet

            heads, o = DeltaNet.of(module.linear_attn), module.linear_attn.out_proj
        else:
            heads = _heads_of(module.self_attn, window, zero_centred=next_norm.zero_centred)
            o = module.self_attn.o_proj
        experts = None
        if expert_layer is not None:
            from hone.models.experts import Experts

            experts = Experts.of(module.mlp, expert_layer, ops.rank)
        return cls(
            heads=heads,
            qkv=_projection_of(module),
            o=Projection.of(o),
            mlp_norm=next_norm._replace(weight=module.post_attention_layernorm.weight),
            mlp=None if mlp is None else Mlp.of(mlp),
            experts=experts,
            next_norm=next_norm,
            ops=ops,
        )

    def __call__(
        self, x: Tensor, residual: Tensor, positions: Tensor, rotary: Tensor, context: Any
    ) -> tuple[Tensor, Tensor]:
        """Map the normed residual x and the residual, both [T, D], to those of the next layer."""
        ops, heads = self.ops, self.heads
        projected = ops.linear(x, self.qkv)
        if not isinstance(heads, Heads):
            mixed = ops.mix_heads(projected, heads, context)
        else:
            qkv = projected.view(len(x), -1, heads.head_dim)
            mixed = ops.attend(qkv, heads, positions, rotary, context).flatten(1)
        x = ops.sum_linear(mixed, self.o)
        x, residual = ops.add_rms_norm(x, residual, self.mlp_norm)
        if self.experts is not None:
            x = ops.sum_experts(x, self.experts, self.mlp, context)
        else:
            assert self.mlp is not None, "a layer has experts, an MLP, or both"
            x = ops.sum_linear(ops.gated_linear(x, self.mlp.gate_up), self.mlp.down)
        return ops.add_rms_norm(x, residual, self.next_norm)


def _heads_of(attention: Any, window: int | None, *, zero_centred: bool) -> Heads:
    """The heads of an attention of transformers. If ranks share them, this rank's number, not that
    of the config."""
    gated = spec_of(attention.config.model_type).gated_attention
    return Heads(
        layer_index=attention.layer_idx,
        num_heads=attention.q_proj.out_features // attention.head_dim // (2 if gated else 1),
        head_dim=attention.head_dim,
        scale=attention.scaling,
        window=window,
        q_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        k_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        eps=attention.config.rms_norm_eps,
        zero_centred=zero_centred,
        gated=gated,
    )


class FusedDecoder:
    """The backbone of an `is_fusible` model, from token ids to the final norm."""

    layers: list[Callable[..., tuple[Tensor, Tensor]]]

    def __init__(self, model: PreTrainedModel, ops: LayerOps) -> None:
        """Merge parameters of `model` in place, one layer at a time."""
        base: Any = model.base_model
        self._ops = ops
        self._embedding: Tensor = base.embed_tokens.weight
        self._padding_idx: int | None = base.embed_tokens.padding_idx
        self._rotary = RotaryTable(base.rotary_emb, dtype=model.dtype, device=model.device)
        config: dict[str, Any] = model.config.to_dict()
        spec = spec_of(model.config.model_type)
        assert spec.decode is not None, f"{spec.model_type} has no fused decode"
        modules = (*(layer.input_layernorm for layer in base.layers), base.norm)
        eps, zero_centred = model.config.rms_norm_eps, spec.decode.has_zero_centred_norms
        self._first_norm, *self._next_norms = (Norm(m.weight, eps, zero_centred) for m in modules)
        windows, expert_layers = spec.layer_windows(config), spec.expert_layers(config)
        self.layers = [
            FusedLayer.of(module, next_norm, window, ops, expert_layers.get(index))
            for index, (module, next_norm, window) in enumerate(
                zip(base.layers, self._next_norms, windows, strict=True)
            )
        ]
        # Parameters outside of the layers.
        self._addresses = addresses_of(
            parameter
            for layer in base.layers
            for name, parameter in layer.named_parameters()
            if name.split(".")[-2] in MERGED
        )
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # frees the former memory of the merged parameters

    def __call__(self, input_ids: Tensor, position_ids: Tensor, context: Any) -> Tensor:
        """Hidden states [T, D] of ids [T] at positions [T], or [A, T], both int64, in the context
        of the operations. Raises RuntimeError if parameters have moved since they were merged."""
        require_addresses(self._addresses)
        contents: ContentFeatures | None = context.contents
        residual = F.embedding(input_ids, self._embedding, self._padding_idx)
        if contents is not None:
            residual = embed_contents(residual, contents.index, contents.features)
        count = self._ops.num_positions(context)
        rotary, rows = self._rotary.rows(count), position_ids
        if position_ids.ndim > 1:
            rotary, rows = self._rotary.of_tokens(position_ids, count)
        x = self._ops.rms_norm(residual, self._first_norm)
        for number, layer in enumerate(self.layers):
            x, residual = layer(x, residual, rows, rotary, context)
            if contents is None or contents.deepstack is None:
                continue
            if number < len(contents.deepstack):
                residual = add_deepstack(residual, contents.index, contents.deepstack[number])
                x = self._ops.rms_norm(residual, self._next_norms[number])
        return x


class RotaryTable:
    """Table of rotary embeddings, computed by the model's own module.

    Rows hold the R / 2 cosines and R / 2 sines of a position, where R values of a head are rotated:
    16 MiB for 65,536 positions of 128 16-bit numbers. The table grows on demand by doubling. Former
    tables are kept, since graphs may refer to them.
    """

    def __init__(self, module: nn.Module, *, dtype: torch.dtype, device: torch.device) -> None:
        self._module = module
        # Gives the module dtype and device.
        self._example = torch.empty(0, dtype=dtype, device=device)
        self._tables: list[Tensor] = []
        self._axes: Tensor | None = None

    def rows(self, count: int) -> Tensor:
        """A table [P, R] of at least the first `count` positions. Raises RuntimeError if a graph
        that is being captured needs a longer table."""
        if not self._tables or len(self._tables[-1]) < count:
            if self._example.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"the rotary embeddings of {count} positions must be computed before a graph "
                    "is recorded that reads them: run the forward once with the same context"
                )
            self._tables.append(self._compute(max(MIN_POSITIONS, 1 << (count - 1).bit_length())))
        return self._tables[-1]

    def of_tokens(self, positions: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """A table with one row [T, R] for each token, whose positions [A, T] are below `count`, and
        the numbers [T] of its rows. Pairs of a head turn by the positions of different axes."""
        if self._axes is None:
            self._axes = self._find_axes(len(positions))
        rows = self.rows(count).gather(0, positions[self._axes].T)
        return rows, torch.arange(len(rows), device=rows.device)

    def _find_axes(self, num_axes: int) -> Tensor:
        """The axis [R] of each column of a table: the one whose position alone makes its sine."""
        # At [A, 1, A]: token a has position 1 on axis a and 0 on the others.
        alone = torch.eye(num_axes, dtype=torch.int64, device=self._example.device).unsqueeze(1)
        _, sines = self._module(self._example, alone)
        half = sines[0].abs().chunk(2, -1)[0].argmax(0)
        return torch.cat((half, half))

    # Not an inference tensor, whoever asks first: training saves it for backward.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _compute(self, count: int) -> Tensor:
        positions = torch.arange(count, device=self._example.device).unsqueeze(0)
        if hasattr(self._module, "mrope_section"):
            positions = positions.expand(3, 1, -1)
        halves = [x[0].chunk(2, -1)[0] for x in self._module(self._example, positions)]
        return torch.cat(halves, -1)
