"""Tensor and sequence parallelism of the trained model.

Parameters become DTensors over the tensor axis (Megatron-LM, Shoeybi et al., arXiv:1909.08053), and
between layers each rank has its share of the tokens (sequence parallelism, Korthikanti et al.,
arXiv:2205.05198):

    embedding, head          rows, the vocabulary; one tensor where they are tied
    q, k, v, gate, up        rows: a rank's own heads and inner size
    o, down                  columns: partial sums, added up by a reduce-scatter over the tokens
    linear attention         heads, in the same way; `own_rows` says how a rank gets its rows of
                             queries, keys and values, which lie behind each other in one weight
    norms                    whole on every rank, each sees its share of tokens or of heads
    head of values           whole on every rank, each sees all tokens
    routers                  whole on every rank, each sees its share of tokens
    experts                  not here: `hone.trainer.experts` divides them over an axis that
                             includes this one, whose ranks have different tokens there
    adapters                 B is split where W has rows, A where it has columns; the other one is
                             whole, and each rank computes a part of its gradient

A layer gathers all tokens before attention and before an MLP, and scatters them again after it. In
place of an MLP a mixture of experts gets a rank's share; a shared expert beside it is an MLP.
The number of tokens is arbitrary: the last ranks' shares are padded with rows that nobody reads.
Hidden states after the final norm are whole and equal on every rank; their gradient must be, too.

DTensors hold the parameters, for FSDP and checkpoints, but layers compute with plain tensors: a
compiled layer with DTensors inside cannot have a dynamic number of tokens. Apply it before FSDP,
whose shards then are DTensors over both axes. The head is not called as a module:
`hone.trainer.logprobs` multiplies with a rank's rows of it.

Letters: T tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, ClassVar, TypeAlias, cast

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from transformers import PreTrainedModel

from hone.attention.recurrent.layer import DeltaWeights, PackedDeltaNet, is_recurrent, set_heads
from hone.distributed.mesh import Mesh
from hone.families.registry import DIVIDED_FAMILIES, SPECS
from hone.families.spec import Split
from hone.models.adapters import LoraLinear
from hone.models.decoder import Elsewhere, decoder_layers, head_weight
from hone.models.heads import has_value_head, value_head
from hone.trainer.row_shares import first_row, gather_rows

__all__ = ["SplitModule", "own_part", "own_rows", "parallelize"]


def parallelize(model: PreTrainedModel, mesh: Mesh) -> None:
    """Split `model` over the tensor axis of `mesh`, in place; nothing with one rank along it.

    Every rank passes the same whole weights and keeps its part of them; no messages are sent.
    Weights in host memory are copied to the mesh's device one by one, where the parts stay. Weights
    on the meta device stay there, as parts. The family must be of `DIVIDED_FAMILIES`; the ranks
    divide its heads and inner size.
    """
    if mesh.tensor_mesh is None:
        return
    head: Any = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    is_tied = not isinstance(embedding, Elsewhere) and head_weight(model) is embedding.weight
    base: Any = model.base_model
    for module, layer_class in _split_modules(model):
        layer_class.split(module, mesh.tensor_mesh)
        if layer_class is not SplitHeads:
            module.__class__ = layer_class
    if is_tied:
        head.weight = embedding.weight
    elif has_value_head(model):
        ValueHead.split(value_head(model), mesh.tensor_mesh)
    elif not isinstance(head, Elsewhere):
        ColumnLinear.split(head, mesh.tensor_mesh)
    for layer in cast(Any, decoder_layers(model)):
        if hasattr(layer, "linear_attn"):
            layer.register_forward_pre_hook(_name_positions, with_kwargs=True)
            layer.linear_attn.register_forward_pre_hook(_gather_for_attention, with_kwargs=True)
        else:
            layer.self_attn.register_forward_pre_hook(_gather_for_attention, with_kwargs=True)
        mlp = getattr(layer.mlp, "shared_experts", None) if _has_experts(layer) else layer.mlp
        if mlp is not None:
            mlp.register_forward_pre_hook(_gather_for_mlp)
    base.register_forward_hook(_gather_output, with_kwargs=True)


def _split_modules(model: PreTrainedModel) -> Iterator[tuple[nn.Module, type[SplitModule]]]:
    """Each module of the backbone in this process, and the class that replaces its own."""
    family = model.config.model_type
    assert family in DIVIDED_FAMILIES, f"{family} is not split over the tensor axis"
    plan = SPECS[family].tensor_plan
    assert plan is not None
    for layer in decoder_layers(model):
        modules = dict(layer.named_modules())
        for name, split in plan.items():
            module = modules.get(name)  # of two kinds of layers one has it
            if module is not None and split != "experts":
                yield module, _class_of(module, split)
    base: Any = model.base_model
    norm: nn.Module = base.norm
    embedding: nn.Module = base.embed_tokens
    if not isinstance(norm, Elsewhere):
        yield norm, _class_of(norm, "shared")
    if not isinstance(embedding, Elsewhere):
        yield embedding, VocabularyEmbedding


def _has_experts(layer: nn.Module) -> bool:
    """Whether a decoder layer has a mixture of experts in place of an MLP."""
    return hasattr(cast(Any, layer).mlp, "experts")


def _class_of(module: nn.Module, split: Split) -> type[SplitModule]:
    if is_recurrent(module):
        return SplitHeads
    if isinstance(module, LoraLinear):
        assert not module.is_4bit, "codes of four bits are not split"
        return _ADAPTED[split]
    if split == "qkv_rows":
        return QkvLinear if isinstance(module, nn.Linear) else SplitConvolution
    if split == "shared" and hasattr(module, "top_k"):
        return SharedRouter
    if split == "shared" and hasattr(module, "eps"):  # as families with `1 + weight` name it
        return CentredNorm
    return _CLASSES[split]


class SplitModule(nn.Module):
    """A module whose parameters are DTensors over the tensor axis."""

    placements: ClassVar[dict[str, Placement]]
    """Placement of each parameter over the tensor axis."""

    @classmethod
    def split(cls, module: nn.Module, mesh: DeviceMesh) -> None:
        """Replace the parameters of `module`, which are equal on every rank."""
        for name, whole in list(module.named_parameters(recurse=False)):
            # Without a source rank each takes its part of its own copy.
            part = distribute_tensor(
                whole.detach(), mesh, [cls.placements[name]], src_data_rank=None
            )
            setattr(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))


class ColumnLinear(SplitModule, nn.Linear):
    """Column-parallel linear layer: all tokens in, this rank's output features out."""

    placements: ClassVar = {"weight": Shard(0), "bias": Shard(0)}

    def forward(self, input: Tensor) -> Tensor:
        bias = cast(Tensor | None, self.bias)
        return F.linear(input, own_part(self.weight), None if bias is None else own_part(bias))


class RowLinear(SplitModule, nn.Linear):
    """Row-parallel linear layer: this rank's input features in, summed outputs of its share of the
    tokens out."""

    placements: ClassVar = {"weight": Shard(1), "bias": Replicate()}

    def forward(self, input: Tensor) -> Tensor:
        share = _scatter_sum(F.linear(input, own_part(self.weight)), _mesh(self.weight))
        bias = cast(Tensor | None, self.bias)
        return share if bias is None else share + _shared(bias)


class ColumnLora(SplitModule, LoraLinear):
    """`ColumnLinear` with an adapter."""

    placements: ClassVar = {
        "weight": Shard(0),
        "bias": Shard(0),
        "lora_A": Replicate(),
        "lora_B": Shard(0),
    }

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else own_part(self.bias)
        y = F.linear(x, own_part(self.weight), bias)
        return self.add_adapter(y, x, _shared(self.lora_A), own_part(self.lora_B))


class RowLora(SplitModule, LoraLinear):
    """`RowLinear` with an adapter, whose partial sums are added up with those of the weight."""

    placements: ClassVar = {
        "weight": Shard(1),
        "bias": Replicate(),
        "lora_A": Shard(1),
        "lora_B": Replicate(),
    }

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, own_part(self.weight))
        y = self.add_adapter(y, x, own_part(self.lora_A), _shared(self.lora_B))
        share = _scatter_sum(y, _mesh(self.weight))
        return share if self.bias is None else share + _shared(self.bias)


class VocabularyEmbedding(SplitModule, nn.Embedding):
    """Vocabulary-parallel embedding: all token ids in, embeddings of this rank's share of the
    tokens out."""

    placements: ClassVar = {"weight": Shard(0)}

    def forward(self, input: Tensor) -> Tensor:
        mesh, rows = _mesh(self.weight), own_part(self.weight)
        first = first_row(self.num_embeddings, mesh.get_local_rank(), mesh.size())
        ids = input - first
        is_own = (ids >= 0) & (ids < len(rows))
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < len(rows):
            padding = None
        values = F.embedding(ids.where(is_own, 0), rows, padding)
        return _scatter_sum(values.masked_fill(~is_own[..., None], 0.0), mesh)


class SharedNorm(SplitModule):
    """RMSNorm over this rank's share of the rows."""

    placements: ClassVar = {"weight": Replicate()}
    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        return _shared(self.weight) * _normalized(x, self.variance_epsilon).to(x.dtype)


class CentredNorm(SplitModule):
    """RMSNorm over this rank's share of the rows that multiplies by 1 + weight, in float32."""

    placements: ClassVar = {"weight": Replicate()}
    weight: nn.Parameter
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        weight = 1.0 + _shared(self.weight).float()
        return (_normalized(x, self.eps) * weight).to(x.dtype)


class SharedRouter(SplitModule):
    """A family's router over this rank's share of the tokens."""

    placements: ClassVar = {"weight": Replicate()}
    weight: nn.Parameter
    choose: Callable[[Any, Tensor], tuple[Tensor, ...]]
    """The forward of the family's class."""

    @classmethod
    def split(cls, module: nn.Module, mesh: DeviceMesh) -> None:
        super().split(module, mesh)
        own: Any = module
        own.choose = type(module).forward

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        return self.choose(_PlainRouter(self, _shared(self.weight)), hidden_states)

    def own_share(self, x_T: Tensor, padding: int) -> Tensor:
        """What belongs to this rank's share of tokens, of something of all tokens."""
        mesh = _mesh(self.weight)
        missing = -len(x_T) % mesh.size()
        padded = F.pad(x_T, (0, 0) * (x_T.dim() - 1) + (0, missing), value=padding)
        return padded.chunk(mesh.size())[mesh.get_local_rank()]


class _PlainRouter:
    """A router as its family's forward reads it, whose weight is a plain tensor."""

    def __init__(self, module: nn.Module, weight: Tensor) -> None:
        self.module = module
        self.weight = weight

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def _normalized(x: Tensor, eps: float) -> Tensor:
    """x over its root mean square along the last dimension, in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


class SplitHeads(SplitModule):
    """A gated delta net, as far as its own parameters go: those of this rank's heads."""

    placements: ClassVar = {"A_log": Shard(0), "dt_bias": Shard(0)}

    @classmethod
    def split(cls, module: nn.Module, mesh: DeviceMesh) -> None:
        super().split(module, mesh)
        own: Any = module
        rows, size = (own.key_dim, own.key_dim, own.value_dim), mesh.size()
        own.in_proj_qkv.all_rows = own.conv1d.all_rows = rows
        keys, values = own.num_k_heads // size, own.num_v_heads // size
        set_heads(module, num_key_heads=keys, num_value_heads=values)
        own.forward = _SplitDeltaNet(module)


class QkvLinear(SplitModule, nn.Linear):
    """All tokens in, the queries, keys and values of this rank's heads out, behind each other."""

    placements: ClassVar = {"weight": Shard(0)}
    all_rows: tuple[int, int, int]
    """Rows of all queries, all keys and all values."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, own_rows(self.weight, self.all_rows))


class QkvLora(SplitModule, LoraLinear):
    """`QkvLinear` with an adapter."""

    placements: ClassVar = {"weight": Shard(0), "lora_A": Replicate(), "lora_B": Shard(0)}
    all_rows: tuple[int, int, int]

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, own_rows(self.weight, self.all_rows))
        b = own_rows(self.lora_B, self.all_rows)
        return self.add_adapter(y, x, _shared(self.lora_A), b)


class SplitConvolution(SplitModule):
    """A convolution of each channel of queries, keys and values, whose weight others read."""

    placements: ClassVar = {"weight": Shard(0)}


class _SplitDeltaNet(PackedDeltaNet):
    def weights(self) -> DeltaWeights:
        module: Any = self.module
        convolution = own_rows(module.conv1d.weight, module.conv1d.all_rows)
        return DeltaWeights(
            convolution=convolution.squeeze(1),
            A_log=own_part(module.A_log),
            dt_bias=own_part(module.dt_bias),
            norm=_shared(module.norm.weight),
        )


class ValueHead(SplitModule):
    """Head of one row, whole on every rank; each rank computes its whole gradient."""

    placements: ClassVar = {"weight": Replicate()}


_CLASSES: dict[Split, type[SplitModule]] = {
    "rows": ColumnLinear,
    "columns": RowLinear,
    "shared": SharedNorm,
}
_ADAPTED: dict[Split, type[SplitModule]] = {
    "rows": ColumnLora,
    "columns": RowLora,
    "qkv_rows": QkvLora,
}


def own_part(parameter: Tensor) -> Tensor:
    """A rank's part of a split parameter."""
    return cast(DTensor, parameter).to_local()


def own_rows(parameter: Tensor, blocks: Sequence[int]) -> Tensor:
    """The rows of this rank's heads, of a parameter that consists of blocks of these numbers of
    rows, each with rows of all heads in order.

    As a DTensor it is cut in order, for FSDP, checkpoints and syncs, so that a rank holds rows of
    other ranks' heads. An all-to-all exchanges them, and their gradients in backward: 1 / size of
    the weight.
    """
    return _ExchangeRows.apply(own_part(parameter), _mesh(parameter), tuple(blocks))


class _ExchangeRows(torch.autograd.Function):
    """From the rows that a rank holds to those that it computes with, which each one rank needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, blocks: tuple[int, ...]) -> Tensor:
        ctx.mesh = mesh
        ctx.pieces = pieces = _pieces(blocks, mesh.size())
        rank = mesh.get_local_rank()
        sent = [x[start:stop] for to in pieces[rank] for start, stop in to]
        return _all_to_all(torch.cat(sent), *_splits(pieces, rank), mesh)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        pieces, rank = ctx.pieces, ctx.mesh.get_local_rank()
        gives, gets = _splits(pieces, rank)
        received = _all_to_all(grads[0].contiguous(), gets, gives, ctx.mesh)
        own = [span for to in pieces[rank] for span in to]
        parts = received.split([stop - start for start, stop in own])
        return (
            torch.cat([part for _, part in sorted(zip(own, parts, strict=True), key=_first)]),
            None,
            None,
        )


def _first(pair: tuple[tuple[int, int], Tensor]) -> int:
    return pair[0][0]


Pieces: TypeAlias = "tuple[tuple[tuple[tuple[int, int], ...], ...], ...]"
"""Ranges of the rows of each rank that go to each rank."""


@lru_cache
def _pieces(blocks: tuple[int, ...], size: int) -> Pieces:
    """A rank holds a contiguous part of all rows, and needs one of each block."""
    held = sum(blocks) // size
    starts = list(accumulate(blocks, initial=0))
    needed = [
        [
            (start + rank * n // size, start + (rank + 1) * n // size)
            for start, n in zip(starts, blocks, strict=False)
        ]
        for rank in range(size)
    ]
    return tuple(
        tuple(
            tuple(
                (max(start - first, 0), min(stop - first, held))
                for start, stop in spans
                if start - first < held and stop > first
            )
            for spans in needed
        )
        for first in range(0, held * size, held)
    )


def _splits(pieces: Pieces, rank: int) -> tuple[list[int], list[int]]:
    """Numbers of rows that a rank gives to each rank, and gets from each."""
    numbers = [[sum(stop - start for start, stop in spans) for spans in own] for own in pieces]
    return numbers[rank], [own[rank] for own in numbers]


def _shared(parameter: Tensor) -> Tensor:
    """A parameter that is whole on every rank, while each rank computes a part of its gradient."""
    return _SumGradients.apply(own_part(parameter), _mesh(parameter))


class _SumGradients(torch.autograd.Function):
    """The identity; its gradients are added up over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum(grads[0], ctx.mesh), None


def _mesh(parameter: Tensor) -> DeviceMesh:
    return cast(DTensor, parameter).device_mesh


def _scatter_sum(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Add up x [1, T, D] over ranks; each gets the next ceil(T / size) tokens of the sum."""
    missing = -x.shape[1] % mesh.size()
    return _ScatterSum.apply(F.pad(x[0], (0, 0, 0, missing)), mesh).unsqueeze(0)


def _gather(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Gather the tokens of all ranks, padding included: [1, t, D] to [1, size * t, D]."""
    return _Gather.apply(x[0], mesh).unsqueeze(0)


class _ScatterSum(torch.autograd.Function):
    """Reduce-scatter: partial sums [T, D] to this rank's rows of the sum, [T / size, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return _sum_and_scatter(x, mesh)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return gather_rows(grads[0], (ctx.mesh, 0)), None


class _Gather(torch.autograd.Function):
    """All-gather of rows that each rank uses differently, so backward adds up their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return gather_rows(x, (mesh, 0))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum_and_scatter(grads[0], ctx.mesh), None


class _GatherWhole(_Gather):
    """All-gather of rows that all ranks use in the same way, so their gradients are equal."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].chunk(ctx.mesh.size())[ctx.mesh.get_local_rank()], None


# Collectives that can be part of a compiled layer. Their results are waited for at once: a tensor
# that is still in transfer loses its gradient on the way into a compiled layer.

# Renamed in torch 2.13, where the old name warns.
_reduce_scatter = (
    getattr(collectives, "reduce_scatter_single", None) or collectives.reduce_scatter_tensor
)


def _sum_and_scatter(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return collectives.wait_tensor(_reduce_scatter(x.contiguous(), "sum", 0, (mesh, 0)))


def _sum(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return collectives.wait_tensor(collectives.all_reduce(x, "sum", (mesh, 0)))


def _all_to_all(x: Tensor, gives: list[int], gets: list[int], mesh: DeviceMesh) -> Tensor:
    """Rows of x in order of the ranks that they go to, `gives` of them to each; those received."""
    received = collectives.all_to_all_single(x.flatten(1), gets, gives, (mesh, 0))
    return collectives.wait_tensor(received).unflatten(1, x.shape[1:])


def _gather_for_attention(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    output = module.out_proj if is_recurrent(module) else module.o_proj
    tokens = _gather(kwargs["hidden_states"], _mesh(output.weight))
    positions = kwargs.get("all_positions") or kwargs["position_embeddings"]
    return args, kwargs | {"hidden_states": tokens[:, : positions[0].shape[1]]}


def _name_positions(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Keyword arguments of a layer that also reach its recurrence, which gets no positions."""
    return args, kwargs | {"all_positions": kwargs["position_embeddings"]}


def _gather_for_mlp(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (_gather(args[0], _mesh(module.down_proj.weight)),)


def _gather_output(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    if isinstance(module.norm, Elsewhere):  # shares go on to the next pipeline stage
        return output
    hidden_TD = _GatherWhole.apply(output.last_hidden_state[0], _mesh(module.norm.weight))
    output.last_hidden_state = hidden_TD[None, : kwargs["position_ids"].shape[-1]]
    return output
