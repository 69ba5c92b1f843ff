"""The experts of a layer that generates: which each token goes to, and what they compute, in torch.

A CPU runs this, a GPU for prompts, whose many rows keep grouped products busy. Decode steps on CUDA
run the kernels of `hone.models.expert_kernels`, of which this is the reference implementation.

Where ranks share a layer's experts each computes its own, for the tokens that come to them, and the
parts are added up as those of an MLP are.

Letters: T tokens, K experts of a token, E experts, N of them on this rank, D model width, I inner
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
"""Is given the experts [T, K] that the tokens of a layer pass; None: nobody asks."""
Unpack: TypeAlias = "Callable[[Tensor, torch.dtype], Tensor]"
Linear: TypeAlias = "Callable[[Tensor, Tensor, Tensor | None], Tensor]"


class SigmoidScores(NamedTuple):
    """Scores of a router that are each logit's own, as DeepSeek-V3's are (arXiv:2412.19437), and
    how experts are chosen by them. Router and gate weights are float32 in any model."""

    correction: Tensor
    """[E] float32, added to the scores by which experts are chosen, not to their gate weights."""
    num_groups: int = 1
    """Groups of experts that lie side by side, each judged by the sum of its best two."""
    kept_groups: int = 1
    """Those of a token's best groups, in which alone it chooses."""
    scale: float = 1.0
    """Of gate weights, once they are normalised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture of experts of a layer, over the parameters of transformers' modules."""

    router: Tensor
    """[E, D]."""
    gate_up: Tensor
    """[N, 2 I, D]; of each expert the rows of the gate, then those of the other product. Like
    `down`, it may be packed (`hone.models.int8_rows`)."""
    down: Tensor
    """[N, D, I]."""
    per_token: int
    """K."""
    normalises: bool
    """Whether the gate weights of a token are divided by their sum."""
    sigmoid: SigmoidScores | None = None
    """None: scores are the softmax of the logits, and experts are chosen by them alone."""
    layer: int = 0
    """Place among the layers with experts."""
    first: int = 0
    """The number, of all experts, of the first that is here."""

    @classmethod
    def of(cls, mlp: Any, layer: int, rank: int = 0) -> Self:
        """Those of `mlp`, a module with a router `gate` and stacked `experts`: all of them, or
        where ranks share them those of `rank`."""
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

    @property
    def are_all(self) -> bool:
        """Whether no other rank has any."""
        return len(self.down) == len(self.router)


def router_logits(x: Tensor, experts: Experts, linear: Linear = F.linear) -> Tensor:
    """The router's logits [T, E] for x [T, D]: in the dtype of x, as `linear` computes them; those
    of sigmoid scores in float32."""
    if experts.sigmoid is None:
        return linear(x, experts.router, None)
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x, experts.router.T, out_dtype=torch.float32)  # which no CPU has
    return F.linear(x.float(), experts.router.float())


def route(logits: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """The experts of each token by the router's logits [T, E], and their gate weights, in the
    dtype of the logits: int64 and floats [T, K], the best choice first."""
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
    """What the experts of each token make of x [T, D], weighted and added up: [T, D]. Of experts
    that ranks share it is this rank's part of the sum. `unpack` does what `unpack_rows` does."""
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
    """As `sum_chosen`, where of all experts those from `first` on are here: the part of the sum
    that they have. Zeros for tokens that pass none of them."""
    own_TK = ids_TK - first
    is_own_TK = (own_TK >= 0) & (own_TK < len(down))
    # Rows behind those of the last expert are of none.
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
    """The outputs of chosen experts for x [T, D], weighted and added up: [T, D]. Choices that are
    not `is_own` have ids behind the last, and count for nothing."""
    order = ids_TK.flatten().argsort(stable=True)
    each = torch.arange(len(down), device=x.device)
    ends_E = torch.searchsorted(ids_TK.flatten()[order], each, right=True).int()
    rows = x[order // ids_TK.shape[1]]
    inner = F.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends_E)
    gate, up = inner.chunk(2, -1)
    sorted_rows = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends_E)
    parts_TKD = torch.empty_like(sorted_rows).index_copy_(0, order, sorted_rows)
    parts_TKD = parts_TKD.view(*ids_TK.shape, -1)
    if is_own_TK is not None:  # products leave the rows of no expert as memory was
        parts_TKD = parts_TKD.masked_fill(~is_own_TK.unsqueeze(-1), 0)
    return (parts_TKD * weights_TK.unsqueeze(-1)).sum(1).to(x.dtype)
