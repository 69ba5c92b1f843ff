"""The experts of a layer that generates: which each token goes to, and what they compute, in torch.

A CPU runs this, a GPU for prompts, whose many rows keep grouped products busy. Decode steps on CUDA
run the kernels of `hone.models.expert_kernels`, of which this is the reference implementation.

Letters: T tokens, K experts of a token, E experts, D model width, I inner width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Experts", "Record", "route", "sum_experts"]

Record: TypeAlias = "Callable[[Tensor], None] | None"
"""Is given the experts [T, K] that the tokens of a layer pass; None: nobody asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture of experts of a layer, over the parameters of transformers' modules."""

    router: Tensor
    """[E, D]."""
    gate_up: Tensor
    """[E, 2 I, D]; of each expert the rows of the gate, then those of the other product."""
    down: Tensor
    """[E, D, I]."""
    per_token: int
    """K."""
    normalises: bool
    """Whether the gate weights of a token add up to one."""
    layer: int = 0
    """Place among the layers with experts."""

    @classmethod
    def of(cls, mlp: Any, layer: int) -> Self:
        """Those of `mlp`, a module with a router `gate` and stacked `experts`."""
        return cls(
            router=mlp.gate.weight,
            gate_up=mlp.experts.gate_up_proj,
            down=mlp.experts.down_proj,
            per_token=mlp.gate.top_k,
            normalises=mlp.gate.norm_topk_prob,
            layer=layer,
        )


def route(logits: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """The experts of each token by the router's logits [T, E], and their gate weights, in the
    dtype of the logits: int64 and floats [T, K], the largest first."""
    weights, ids = logits.softmax(-1, dtype=torch.float32).topk(experts.per_token, dim=-1)
    if experts.normalises:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights.to(logits.dtype)


def sum_experts(x: Tensor, experts: Experts, record: Record = None) -> Tensor:
    """What the experts of each token make of x [T, D], weighted and added up: [T, D]."""
    ids_TK, weights_TK = route(F.linear(x, experts.router), experts)
    if record is not None:
        record(ids_TK)
    order = ids_TK.flatten().argsort(stable=True)
    each = torch.arange(len(experts.router), device=x.device)
    ends_E = torch.searchsorted(ids_TK.flatten()[order], each, right=True).int()
    rows = x[order // experts.per_token]
    inner = F.grouped_mm(rows, experts.gate_up.transpose(1, 2), offs=ends_E)
    gate, up = inner.chunk(2, -1)
    sorted_rows = F.grouped_mm(F.silu(gate) * up, experts.down.transpose(1, 2), offs=ends_E)
    parts_TKD = torch.empty_like(sorted_rows).index_copy_(0, order, sorted_rows)
    parts_TKD = parts_TKD.view(*ids_TK.shape, -1) * weights_TK.unsqueeze(-1)
    return parts_TKD.sum(1)
