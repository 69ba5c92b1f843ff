"""Experts of a layer in generation, in torch: routing and computation.

Used on CPUs, and on GPUs for prompts, whose many rows keep grouped products busy. Decode steps on
CUDA run the kernels of `hone.models.expert_kernels`, of which this is the reference implementation.
If ranks share a layer's experts, each computes its own for the tokens that choose them, and the
partial sums are added as those of an MLP.

Letters: T tokens, K experts per token, E experts, N of them on this rank, D model width, I inner
width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.models.int8_rows import is_packed, unpack_rows

__all__ = [
    "Experts",
    "Record",
    "SigmoidScores",
    "route",
    "router_logits",
    "sum_experts",
    "sum_own",
]

Record: TypeAlias = "Callable[[Tensor], None] | None"
"""Callback for the experts [T, K] of a layer's tokens, or None."""
Unpack: TypeAlias = "Callable[[Tensor, torch.dtype], Tensor]"
Linear: TypeAlias = "Callable[[Tensor, Tensor, Tensor | None], Tensor]"


class SigmoidScores(NamedTuple):
    """Router scores that are sigmoids of single logits, as in DeepSeek-V3 (arXiv:2412.19437), with
    the parameters of the choice. Router and gate weights are float32 in any model."""

    correction: Tensor
    """[E] float32, added to the scores for the choice of experts, not to gate weights."""
    num_groups: int = 1
    """Number of groups of neighbouring experts. A group's score is the sum of its best two."""
    kept_groups: int = 1
    """Number of best groups from which a token's experts are chosen."""
    scale: float = 1.0
    """Factor of gate weights after normalisation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture of experts of a layer, over the parameters of transformers' modules."""

    router: Tensor
    """[E, D]."""
    gate_up: Tensor
    """[N, 2 I, D]: for each expert the rows of gate, then those of up. May be packed
    (`hone.models.int8_rows`), like `down`."""
    down: Tensor
    """[N, D, I]."""
    per_token: int
    """K, the number of experts per token."""
    normalises: bool
    """Whether a token's gate weights are divided by their sum."""
    sigmoid: SigmoidScores | None = None
    """None: scores are the softmax of the logits, and also decide the choice."""
    layer: int = 0
    """Position among the layers with experts."""
    first: int = 0
    """Index of this rank's first expert among all experts."""

    @classmethod
    def of(cls, mlp: Any, layer: int, rank: int = 0) -> Self:
        """The experts of `mlp`, a module with a router `gate` and stacked `experts`: all, or those
        of `rank` if ranks share them."""
        correction: Tensor | None = getattr(mlp.gate, "e_score_correction_bias", None)
        sigmoid = None
        if correction is not None:
            sigmoid = SigmoidScores(
                correction,
                num_groups=mlp.gate.num_group,
                kept_groups=mlp.gate.topk_group,
                scale=mlp.gate.routed_scaling_factor,
            )
        return cls(
            router=mlp.gate.weight,
            gate_up=mlp.experts.gate_up_proj,
            down=mlp.experts.down_proj,
            per_token=mlp.gate.top_k,
            normalises=mlp.gate.norm_topk_prob,
            sigmoid=sigmoid,
            layer=layer,
            first=rank * len(mlp.experts.down_proj),
        )

    def sum_up(self, x: Tensor, record: Record = None) -> Tensor:
        """`sum_experts` of these."""
        return sum_experts(x, self, record)

    @property
    def are_all(self) -> bool:
        """Whether this rank has all experts."""
        return len(self.down) == len(self.router)


def router_logits(x: Tensor, experts: Experts, linear: Linear = F.linear) -> Tensor:
    """Router logits [T, E] for x [T, D], in the dtype of x as `linear` computes them; in float32
    for sigmoid scores."""
    if experts.sigmoid is None:
        return linear(x, experts.router, None)
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x, experts.router.T, out_dtype=torch.float32)  # not available on CPUs
    return F.linear(x.float(), experts.router.float())


def route(logits: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token from router logits [T, E]. Returns ids int64 [T, K], best
    first, and gate weights [T, K] in the dtype of the logits."""
    if experts.sigmoid is not None:
        return _route_by_sigmoid(logits, experts, experts.sigmoid)
    weights, ids = logits.softmax(-1, dtype=torch.float32).topk(experts.per_token, dim=-1)
    if experts.normalises:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights.to(logits.dtype)


def _route_by_sigmoid(
    logits: Tensor, experts: Experts, sigmoid: SigmoidScores
) -> tuple[Tensor, Tensor]:
    scores_TE = logits.sigmoid()
    choice_TE = scores_TE + sigmoid.correction
    if sigmoid.kept_groups < sigmoid.num_groups:
        groups_TGE = choice_TE.unflatten(-1, (sigmoid.num_groups, -1))
        values_TG = groups_TGE.topk(2, dim=-1).values.sum(-1)
        kept = values_TG.topk(sigmoid.kept_groups, dim=-1).indices
        is_kept_TG = torch.zeros_like(values_TG, dtype=torch.bool).scatter_(-1, kept, True)
        choice_TE = groups_TGE.masked_fill(~is_kept_TG.unsqueeze(-1), -torch.inf).flatten(1)
    ids_TK = choice_TE.topk(experts.per_token, dim=-1).indices
    weights_TK = scores_TE.gather(-1, ids_TK)
    if experts.normalises:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return ids_TK, weights_TK * sigmoid.scale


def sum_experts(
    x: Tensor, experts: Experts, record: Record = None, *, unpack: Unpack = unpack_rows
) -> Tensor:
    """Weighted sum of the outputs of each token's experts for x [T, D]: [T, D]. If ranks share the
    experts, it is this rank's partial sum. `unpack` is `unpack_rows` or an equivalent."""
    ids_TK, weights_TK = route(router_logits(x, experts), experts)
    if record is not None:
        record(ids_TK)
    gate_up, down = (
        unpack(weight, x.dtype) if is_packed(weight) else weight
        for weight in (experts.gate_up, experts.down)
    )
    if experts.are_all:
        return sum_chosen(x, ids_TK, weights_TK, gate_up, down)
    return sum_own(x, ids_TK, weights_TK, gate_up, down, first=experts.first)


def sum_own(
    x: Tensor, ids_TK: Tensor, weights_TK: Tensor, gate_up: Tensor, down: Tensor, *, first: int
) -> Tensor:
    """Partial sum of `sum_chosen` over this rank's experts, which begin at index `first`. Zeros for
    tokens that use none of them."""
    own_TK = ids_TK - first
    is_own_TK = (own_TK >= 0) & (own_TK < len(down))
    # Choices of other ranks get an id after the last expert.
    own_TK = own_TK.masked_fill(~is_own_TK, len(down))
    return sum_chosen(x, own_TK, weights_TK, gate_up, down, is_own_TK=is_own_TK)


def sum_chosen(
    x: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    is_own_TK: Tensor | None = None,
) -> Tensor:
    """Weighted sum of the outputs of chosen experts for x [T, D]: [T, D]. Choices with `is_own_TK`
    False have ids after the last expert, and are ignored."""
    order = ids_TK.flatten().argsort(stable=True)
    each = torch.arange(len(down), device=x.device)
    ends_E = torch.searchsorted(ids_TK.flatten()[order], each, right=True).int()
    rows = x[order // ids_TK.shape[1]]
    inner = F.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends_E)
    gate, up = inner.chunk(2, -1)
    sorted_rows = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends_E)
    parts_TKD = torch.empty_like(sorted_rows).index_copy_(0, order, sorted_rows)
    parts_TKD = parts_TKD.view(*ids_TK.shape, -1)
    if is_own_TK is not None:  # grouped products leave the rows of no expert uninitialised
        parts_TKD = parts_TKD.masked_fill(~is_own_TK.unsqueeze(-1), 0)
    return (parts_TKD * weights_TK.unsqueeze(-1)).sum(1).to(x.dtype)
