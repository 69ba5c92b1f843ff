"""LoRA on the experts of a layer: a pair of matrices for each expert.

Expert e computes `W_e x + (alpha / rank) B_e (A_e x)` in place of `W_e x`. The pairs of all experts
of a layer are two tensors, as the experts themselves are in transformers, and their products are
grouped over the same rows, sorted by expert. A pass never adds pairs to weights: a merged copy of
one layer of 30B-A3B would take 1.2 GB, which forward would write for any number of tokens.

Letters: T tokens, K experts of a token, R rows (a token's state for one of its experts), E experts,
D model width, I inputs and O outputs of a matrix, N rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.models.lora_layer import LoraLayer
from hone.models.products import grouped_product
from hone.models.settings import LoraConfig

__all__ = ["ExpertLora", "GroupedExperts"]

_ALIGNED = 8
"""Grouped products read rows of whole 16 bytes, which are 8 values of bfloat16. Other ranks are
padded with zeros for a product."""


class ExpertLora(LoraLayer):
    """One matrix of each expert of a layer, frozen, with the adapters of all experts. It replaces a
    parameter of the experts module."""

    def forward(self, rows_RI: Tensor, ends_E: Tensor) -> Tensor:
        """As `grouped_product`, with what the adapters add while they are on."""
        if self.is_4bit:
            y_RO = self.nf4_product(rows_RI, ends_E)
        else:
            y_RO = grouped_product(rows_RI, self.weight, ends_E)
        return self.add_adapters(y_RO, rows_RI, ends_E, self.lora_A, self.lora_B)

    def add_adapters(
        self, y_RO: Tensor, rows_RI: Tensor, ends_E: Tensor, a_ENI: Tensor, b_EON: Tensor
    ) -> Tensor:
        """`y_RO` with what these adapters add for `rows_RI`, while they are on."""
        if not self.is_on:
            return y_RO
        missing = -a_ENI.shape[1] % _ALIGNED
        a_ENI, b_EON = F.pad(a_ENI, (0, 0, 0, missing)), F.pad(b_EON, (0, missing))
        inner_RN = grouped_product(rows_RI, a_ENI, ends_E) * self.scaling
        return y_RO + grouped_product(inner_RN, b_EON, ends_E)


class GroupedExperts(nn.Module):
    """transformers' experts module, of whose two parameters `ExpertLora` may stand in the place. It
    becomes the class of such a module, whose other attributes stay."""

    gate_up_proj: nn.Parameter | ExpertLora
    """[E, 2 I, D]: for each expert the rows of gate, then those of up."""
    down_proj: nn.Parameter | ExpertLora
    """[E, D, I]."""
    act_fn: nn.Module

    @classmethod
    def adapt(cls, experts: nn.Module, name: str, cfg: LoraConfig) -> ExpertLora:
        """Give the matrices `name` of a module of transformers, or of this class, adapters in
        place, and return these."""
        weight = experts.get_parameter(name)
        delattr(experts, name)
        layer = ExpertLora(weight, cfg)
        setattr(experts, name, layer)
        experts.__class__ = cls
        return layer

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Outputs [T, D] of tokens [T, D], from the ids of their experts and their gate weights,
        both [T, K]."""
        ids_R, order_R = top_k_index.flatten().sort(stable=True)
        each = torch.arange(len(next(self.parameters())), device=ids_R.device)
        ends_E = torch.searchsorted(ids_R, each, right=True).int()
        sorted_RD = self.products(hidden_states[order_R // top_k_index.shape[1]], ends_E)
        own_TKD = sorted_RD[order_R.argsort()].view(*top_k_index.shape, sorted_RD.shape[1])
        return (own_TKD * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)

    def products(self, rows_RD: Tensor, ends_E: Tensor) -> Tensor:
        """Outputs [R, D] of experts for their rows, sorted by expert, as in `grouped_product`."""
        gate_RI, up_RI = self.multiply(self.gate_up_proj, rows_RD, ends_E).chunk(2, dim=-1)
        return self.multiply(self.down_proj, self.act_fn(gate_RI) * up_RI, ends_E)

    def multiply(
        self, matrices: nn.Parameter | ExpertLora, rows_RI: Tensor, ends_E: Tensor
    ) -> Tensor:
        """Products [R, O] with one matrix of each expert."""
        if isinstance(matrices, ExpertLora):
            return matrices(rows_RI, ends_E)
        return grouped_product(rows_RI, matrices, ends_E)
