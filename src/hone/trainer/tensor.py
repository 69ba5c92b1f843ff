"""Tensor and sequence parallelism of the trained model.

Parameters become DTensors over the tensor axis (Megatron-LM, Shoeybi et al., arXiv:1909.08053), and
between layers each rank has its share of the tokens (sequence parallelism, Korthikanti et al.,
arXiv:2205.05198):

    embedding, head          rows, the vocabulary; one tensor where they are tied
    q, k, v, gate, up        rows: a rank's own heads and inner size
    o, down                  columns: partial sums, added up by a reduce-scatter over the tokens
    norms                    whole on every rank, each sees its share of tokens or of heads
    head of values           whole on every rank, each sees all tokens

A layer gathers all tokens before attention and before the MLP, and scatters them again after it.
The number of tokens is arbitrary: the last ranks' shares are padded with rows that nobody reads.
Hidden states after the final norm are whole and equal on every rank; their gradient must be, too.

DTensors hold the parameters, for FSDP and checkpoints, but layers compute with plain tensors: a
compiled layer with DTensors inside cannot have a dynamic number of tokens. Apply it before FSDP,
whose shards then are DTensors over both axes. The head is not called as a module:
`hone.trainer.logprobs` multiplies with a rank's rows of it.

Letters: T tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, cast

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

from hone.distributed.mesh import Mesh
from hone.families.registry import SPECS, TENSOR_FAMILIES
from hone.families.spec import Split
from hone.models.decoder import Elsewhere, decoder_layers, head_weight
from hone.models.heads import has_value_head, value_head
from hone.trainer.row_shares import first_row, gather_rows

__all__ = ["SplitModule", "own_part", "parallelize"]


def parallelize(model: PreTrainedModel, mesh: Mesh) -> None:
    """Split `model` over the tensor axis of `mesh`, in place; nothing with one rank along it.

    Every rank passes the same whole weights and keeps its part of them; no messages are sent.
    Weights in host memory are copied to the mesh's device one by one, where the parts stay. Weights
    on the meta device stay there, as parts. The family must be of `TENSOR_FAMILIES`; the ranks
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
        module.__class__ = layer_class
    if is_tied:
        head.weight = embedding.weight
    elif has_value_head(model):
        ValueHead.split(value_head(model), mesh.tensor_mesh)
    elif not isinstance(head, Elsewhere):
        ColumnLinear.split(head, mesh.tensor_mesh)
    for layer in cast(Any, decoder_layers(model)):
        layer.self_attn.register_forward_pre_hook(_gather_for_attention, with_kwargs=True)
        layer.mlp.register_forward_pre_hook(_gather_for_mlp)
    base.register_forward_hook(_gather_output, with_kwargs=True)


def _split_modules(model: PreTrainedModel) -> Iterator[tuple[nn.Module, type[SplitModule]]]:
    """Each module of the backbone in this process, and the class that replaces its own."""
    family = model.config.model_type
    assert family in TENSOR_FAMILIES, f"{family} is not split over the tensor axis"
    plan = SPECS[family].tensor_plan
    assert plan is not None
    for layer in decoder_layers(model):
        for name, split in plan.items():
            yield layer.get_submodule(name), _CLASSES[split]
    ends = {"norm": SharedNorm, "embed_tokens": VocabularyEmbedding}
    for name, layer_class in ends.items():
        module = model.base_model.get_submodule(name)
        if not isinstance(module, Elsewhere):
            yield module, layer_class


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
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return _shared(self.weight) * normed.to(x.dtype)


class ValueHead(SplitModule):
    """Head of one row, whole on every rank; each rank computes its whole gradient."""

    placements: ClassVar = {"weight": Replicate()}


_CLASSES: dict[Split, type[SplitModule]] = {
    "rows": ColumnLinear,
    "columns": RowLinear,
    "shared": SharedNorm,
}


def own_part(parameter: Tensor) -> Tensor:
    """A rank's part of a split parameter."""
    return cast(DTensor, parameter).to_local()


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


class _GatherWhole(torch.autograd.Function):
    """All-gather of rows that all ranks use in the same way, so their gradients are equal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return gather_rows(x, (mesh, 0))

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


def _gather_for_attention(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    tokens = _gather(kwargs["hidden_states"], _mesh(module.o_proj.weight))
    num_tokens = kwargs["position_embeddings"][0].shape[1]
    return args, kwargs | {"hidden_states": tokens[:, :num_tokens]}


def _gather_for_mlp(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (_gather(args[0], _mesh(module.down_proj.weight)),)


def _gather_output(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    if isinstance(module.norm, Elsewhere):  # shares go on to the next pipeline stage
        return output
    hidden_TD = _GatherWhole.apply(output.last_hidden_state[0], _mesh(module.norm.weight))
    output.last_hidden_state = hidden_TD[None, : kwargs["position_ids"].shape[-1]]
    return output
