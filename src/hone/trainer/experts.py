"""Expert parallelism of the trained model: each rank of the expert axis holds some experts.

Parameters of `mlp.experts` become DTensors over the expert axis, which divides their first
dimension (Lepikhin et al., arXiv:2006.16668); FSDP shards what is left over `Mesh.expert_fsdp`. All
other parts of a layer are as in a dense model: ranks of this axis train different tokens. A layer
sends the hidden state of each token to the ranks of its experts and gets their outputs back:

    own tokens ──sort by expert──► all-to-all ──sort by expert──► grouped products of own experts
    own tokens ◄──gate weights, sum── all-to-all ◄──────────────────────────┘

Gate weights never travel: they multiply where the router computed them, so its gradient stays
there. The gradient of an expert comes from the tokens of all ranks of the axis and is whole when
backward ends. Every rank takes part in every exchange, and multiplies, with no token at all too.
Adapters of an expert (`hone.models.expert_adapters`) are on its rank.

Letters: T own tokens, K experts of a token, E experts, R received rows, D model width, I inner
width.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard
from transformers import PreTrainedModel

from hone.distributed.mesh import Mesh
from hone.models.decoder import decoder_layers
from hone.models.expert_adapters import ExpertLora, GroupedExperts
from hone.models.products import grouped_product
from hone.trainer.tensor import SplitModule, own_part

__all__ = ["DividedExperts", "divide_experts", "experts_of"]


def divide_experts(model: PreTrainedModel, mesh: Mesh) -> None:
    """Divide the experts of `model` over the expert axis of `mesh`, in place; nothing with one rank
    along it. Before FSDP.

    Every rank brings the same whole weights and keeps its part; no messages are sent. Raises
    ValueError where the model has no experts, or the axis does not divide their number. One of
    several pipeline stages may have no layer with experts.
    """
    if mesh.expert_mesh is None:
        return
    size = mesh.expert_mesh.size()
    blocks = [experts for layer in decoder_layers(model) if (experts := experts_of(layer))]
    if not blocks and mesh.pipeline.size == 1:  # else others may have them all
        raise ValueError(
            f"trainer.parallel.expert_parallel_size is {size}, but the model "
            f"({model.config.model_type}) has no experts. Leave it at 1."
        )
    for experts in blocks:
        number = len(next(experts.parameters()))
        if number % size:
            raise ValueError(
                f"trainer.parallel.expert_parallel_size is {size}, which does not divide the "
                f"{number} experts of a layer. Use a divisor of {number}."
            )
        for module in [*experts.children()]:
            if isinstance(module, ExpertLora):
                assert not module.is_4bit, "codes of four bits are not divided"
                DividedExpertLora.split(module, mesh.expert_mesh)
                module.__class__ = DividedExpertLora
        DividedExperts.split(experts, mesh.expert_mesh)
        experts.__class__ = DividedExperts


def experts_of(layer: nn.Module) -> nn.Module | None:
    """The experts of a decoder layer, all in one module; None where it has an MLP."""
    return getattr(cast(Any, layer).mlp, "experts", None)


class DividedExperts(SplitModule, GroupedExperts):
    """transformers' experts module, or one with adapters, with this rank's E / size experts."""

    placements: ClassVar[dict[str, Placement]] = {"gate_up_proj": Shard(0), "down_proj": Shard(0)}

    @torch.compiler.disable  # numbers of rows come to the host
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator has no type
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """Outputs [T, D] of own tokens [T, D], from the ids of their experts and their gate
        weights, both [T, K]. Forward and backward are collective over the expert axis."""
        divided = next(self.parameters())
        mesh = cast(DTensor, divided).device_mesh
        num_own, size, group = len(own_part(divided)), mesh.size(), mesh.get_group()

        order = top_k_index.flatten().argsort(stable=True)
        counts = torch.bincount(top_k_index.flatten(), minlength=num_own * size)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=group)
        sent_rows, received_rows = torch.stack([counts, received]).view(2, size, -1).sum(2).tolist()

        num_choices = top_k_index.shape[-1]
        rows_RD = _Exchange.apply(
            hidden_states[order // num_choices], sent_rows, received_rows, group
        )
        # The rows arrive ordered by sender, and within each sender by expert.
        ids = torch.arange(num_own, device=counts.device).repeat(size)
        by_expert = ids.repeat_interleave(received).argsort(stable=True)
        ends = received.view(size, -1).sum(0).cumsum(0).int()
        out_RD = self.products(rows_RD[by_expert], ends)

        back = _Exchange.apply(out_RD[_inverse(by_expert)], received_rows, sent_rows, group)
        own_TKD = back[_inverse(order)].view(*top_k_index.shape, back.shape[1])
        return (own_TKD * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)

    def multiply(
        self, matrices: nn.Parameter | ExpertLora, rows_RI: Tensor, ends_E: Tensor
    ) -> Tensor:
        if isinstance(matrices, ExpertLora):
            return matrices(rows_RI, ends_E)
        return grouped_product(rows_RI, own_part(matrices), ends_E)


class DividedExpertLora(SplitModule, ExpertLora):
    """`ExpertLora` of this rank's experts."""

    placements: ClassVar[dict[str, Placement]] = {
        "weight": Shard(0),
        "lora_A": Shard(0),
        "lora_B": Shard(0),
    }

    def forward(self, rows_RI: Tensor, ends_E: Tensor) -> Tensor:
        y_RO = grouped_product(rows_RI, own_part(self.weight), ends_E)
        a_ENI, b_EON = own_part(self.lora_A), own_part(self.lora_B)
        return self.add_adapters(y_RO, rows_RI, ends_E, a_ENI, b_EON)


def _inverse(order: Tensor) -> Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


class _Exchange(torch.autograd.Function):
    """All-to-all exchange: rows [S, D] go out, `sent[i]` of them in turn to rank i, and
    `received[i]` rows come from rank i. Gradients take the opposite way."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    received_rows = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(received_rows, rows.contiguous(), received, sent, group=group)
    return received_rows
