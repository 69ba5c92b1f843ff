"""Routes: which experts the tokens of a layer pass, recorded by an engine, replayed by a trainer.

A router that scores two experts almost alike may choose one where tokens are sampled and the other
where they are trained, and the two sides then have different policies. With routing replay (R3, Ma
et al., arXiv:2510.11370) the trainer sends each token to the experts that it passed when it was
sampled. *Indices alone* are recorded. Gate weights are computed by the trainer's router, from its
scores of all experts, so that the router has its gradient:

    engine     ids = choice(scores)      context.record_routes(layer, ids)
    trainer    ids = context.routes      weights = normalised(scores.gather(ids))

Fused layers (`hone.models.fused_layers`) record by themselves; those of transformers, which replay
and where there is no fused decode record, do it here: the forward of a layer shows its router the
context, also when backward computes the layer again.

Letters: T tokens, L layers with experts, K experts of a token, E experts.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hone.attention import PagedContext
from hone.families.registry import spec_of
from hone.families.shape import ModelShape

__all__ = ["follow_routes", "gate_weights", "route_dtype", "route_size", "unrecorded"]


def route_dtype(num_experts: int) -> torch.dtype:
    """Dtype of the ids of `num_experts` experts, with room for `unrecorded`."""
    return torch.uint8 if num_experts < unrecorded(torch.uint8) else torch.int16


def unrecorded(dtype: torch.dtype) -> int:
    """Id of a token without a recorded route: its router chooses."""
    return torch.iinfo(dtype).max


def route_size(shape: ModelShape) -> tuple[int, int]:
    """L and K of a model: layers with experts and experts per token."""
    return shape.num_expert_layers, shape.experts_per_token


def follow_routes(model: PreTrainedModel) -> None:
    """Let routers of `model` replay and record the routes of contexts, in place. Call before its
    layers are compiled. Idempotent. Raises ValueError if there is no router."""
    spec = spec_of(model.config.model_type)
    if spec.experts is None:
        raise ValueError(f"a {model.config.model_type} model has no experts, and no routes")
    layers: Any = model.base_model.layers
    for index, place in spec.expert_layers(model.config.to_dict()).items():
        layer = layers[index]
        if not isinstance(layer.__dict__.get("forward"), _RoutedLayer):
            layer.forward = _RoutedLayer(layer, place)
            layer.mlp.gate.register_forward_hook(_Choice(spec.experts.scores))


def gate_weights(
    logits_TE: Tensor, ids_TK: Tensor, router: Any, scores: Literal["softmax", "sigmoid"]
) -> Tensor:
    """Gate weights [T, K] of chosen experts as a transformers `router` computes them, with its
    normalisation and factor."""
    if scores == "softmax":
        scores_TE = logits_TE.softmax(-1, dtype=torch.float32)
    else:
        scores_TE = logits_TE.float().sigmoid()
    weights_TK = scores_TE.gather(-1, ids_TK)
    if getattr(router, "norm_topk_prob", True):  # Qwen3.5's has no switch
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return (weights_TK * getattr(router, "routed_scaling_factor", 1.0)).to(logits_TE.dtype)


class _RoutedLayer:
    """Forward of a decoder layer that passes the context to its router. Not a closure:
    `alias_module` copies it with the layer."""

    def __init__(self, layer: nn.Module, place: int) -> None:
        self.layer = layer
        self.place = place

    def __call__(self, *inputs: Any, attention_context: Any = None, **options: Any) -> Any:
        layer: Any = self.layer
        gate = layer.mlp.gate
        gate.seen = (attention_context, self.place)
        try:
            return type(layer).forward(
                layer, *inputs, attention_context=attention_context, **options
            )
        finally:
            gate.seen = None


class _Choice:
    """Forward hook of a router that replaces its choice."""

    def __init__(self, scores: Literal["softmax", "sigmoid"]) -> None:
        self.scores: Literal["softmax", "sigmoid"] = scores

    def __call__(
        self, router: Any, _inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE, weights_TK, ids_TK = output
        context, place = router.seen
        if isinstance(context, PagedContext):
            context.record_routes(place, ids_TK)
        elif context.routes is not None:
            recorded_TK = context.routes[:, place]
            if (own_share := getattr(router, "own_share", None)) is not None:
                recorded_TK = own_share(recorded_TK, unrecorded(recorded_TK.dtype))
            is_recorded = recorded_TK != unrecorded(recorded_TK.dtype)
            ids_TK = torch.where(is_recorded, recorded_TK.long(), ids_TK)
            weights_TK = gate_weights(logits_TE, ids_TK, router, self.scores)
        return logits_TE, weights_TK, ids_TK
