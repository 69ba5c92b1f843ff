"""Convolution and recurrence of one layer over a pass, as its context says.

    training     segments of packed rows, from zero or from the state at the end of a shared prompt
    prefill      the same over chunks of prompts; states are read from and stored in rows
    decode       one token of each sequence, whose states are updated in their rows

Letters: T tokens, C channels of the convolution, W weights of a channel, Hk key heads, H value
heads, K and V sizes of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.compiler import disable

from hone.attention.context import (
    AttentionContext,
    ContextParallel,
    PackedContext,
    PagedContext,
)
from hone.attention.recurrent import convolution, delta_rule, kernels
from hone.attention.recurrent.delta_rule import Tokens
from hone.distributed.mesh import Axis
from hone.segments import Segment, SegmentPlan, plan_segments

__all__ = ["DeltaHeads", "DeltaInputs", "mix"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaHeads:
    """The heads of a layer on this rank. Channels of the convolution are all queries, all keys,
    all values."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    def blocks(self, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        """The channels of queries, of keys and of values, of what has all along `dim`."""
        keys = self.num_key_heads * self.key_dim
        return x.split((keys, keys, self.num_value_heads * self.value_dim), dim)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [T, Hk, K] and values [T, H, V] of channels [T, C]."""
        q, k, v = self.blocks(x, -1)
        return (
            q.unflatten(-1, (self.num_key_heads, self.key_dim)),
            k.unflatten(-1, (self.num_key_heads, self.key_dim)),
            v.unflatten(-1, (self.num_value_heads, self.value_dim)),
        )


class DeltaInputs(NamedTuple):
    """What a layer's projections give to convolution and recurrence."""

    channels: Tensor  # [T, C], before the convolution
    g: Tensor  # [T, H], log of the decay, at most 0, float32 or wider
    beta: Tensor  # [T, H], in (0, 1)


def _mix(
    inputs: DeltaInputs, weight: Tensor, heads: DeltaHeads, layer: Any, context: object
) -> Tensor:
    """Outputs [T, H, V] of a `layer` whose convolution has `weight` [C, W]. Reads and stores states
    where the context has them. Differentiable in training. Raises ValueError without a context.

    It gets the module, not the layer's number: a compiler would compile anew for each number.
    """
    if isinstance(context, PackedContext):
        if context.parallel is not None:
            return _over_processes(inputs, weight, heads, context, context.parallel)
        return _over_segments(inputs, weight, heads, _plan_of(context), None)
    if not isinstance(context, PagedContext):
        raise ValueError(
            "gated linear attention needs attention_context=PackedContext(...) or "
            f"PagedContext(...) among the forward's arguments, got {type(context).__name__}; use "
            "hone.models.decoder.hidden_states"
        )
    states = context.states[layer.layer_idx]
    assert states is not None, f"layer {layer.layer_idx} has no states"
    if context.is_decode:
        return _decode(inputs, weight, heads, states, context)
    assert context.segments is not None, "prefill needs the segments of its chunks"
    return _over_segments(inputs, weight, heads, context.segments, states)


mix = cast(
    "Callable[[DeltaInputs, Tensor, DeltaHeads, Any, AttentionContext], Tensor]", disable(_mix)
)
"""`_mix`, for which a compiled layer leaves the compiler, as it does for attention."""


def _plan_of(context: PackedContext) -> SegmentPlan:
    """Segments of a training pass. Without any it is one of whole sequences."""
    if context.segments is None:
        assert context.keys is None, "rows that share a prompt need segments"
        starts = accumulate(context.lengths, initial=0)
        rows = [Segment(*x) for x in zip(starts, context.lengths, strict=False)]
        device = context.cu_seqlens.device
        context.segments = plan_segments(rows, lambda array: torch.as_tensor(array).to(device))
    return context.segments


def _over_processes(
    inputs: DeltaInputs,
    weight: Tensor,
    heads: DeltaHeads,
    context: PackedContext,
    parallel: ContextParallel,
) -> Tensor:
    """Outputs of this rank's tokens, among several that share the row. Each computes all tokens of
    some of the heads."""
    from hone.attention.context_parallel import heads_to_tokens, tokens_to_heads

    axis = parallel.ulysses
    assert parallel.ring.size == 1, "recurrent layers read a row from its first token on"
    qkv = tokens_to_heads(heads.split(inputs.channels), axis)
    # Of one dtype, so that both go in one exchange.
    g, beta = tokens_to_heads(
        [inputs.g[..., None], inputs.beta.to(inputs.g.dtype)[..., None]], axis
    )
    own = replace(
        heads,
        num_key_heads=heads.num_key_heads // axis.size,
        num_value_heads=heads.num_value_heads // axis.size,
    )
    own_weight = _own_channels(weight, heads, axis)
    whole = DeltaInputs(
        channels=torch.cat([x.flatten(1) for x in qkv], -1),
        g=g.squeeze(-1),
        beta=beta.squeeze(-1).to(inputs.beta.dtype),
    )
    return heads_to_tokens(_over_segments(whole, own_weight, own, _plan_of(context), None), axis)


def _own_channels(weight: Tensor, heads: DeltaHeads, axis: Axis) -> Tensor:
    """The weights of the convolution, [C / size, W], of the heads of this rank."""
    return torch.cat([rows.chunk(axis.size)[axis.rank] for rows in heads.blocks(weight, 0)])


def _over_segments(
    inputs: DeltaInputs,
    weight: Tensor,
    heads: DeltaHeads,
    plan: SegmentPlan,
    states: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Outputs [T, H, V]. Training has no stored `states`."""
    inputs = _reordered(inputs, plan.order)
    stored_inputs, stored_states = _read(plan, states)
    gives_final = plan.writes is not None
    convolved, last = kernels.convolve(
        inputs.channels, weight, plan, stored_inputs, gives_final=gives_final
    )
    tokens = Tokens(*heads.split(convolved), inputs.g, inputs.beta)
    output, final = kernels.gated_delta_rule(tokens, plan, stored_states, gives_final=gives_final)
    if plan.writes is not None and states is not None:
        numbers, rows = plan.writes
        for stored, ended in zip(states, (last, final), strict=True):
            assert ended is not None
            stored.index_copy_(0, rows, ended[numbers].to(stored.dtype))
    return output if plan.order is None else _Permute.apply(output, *reversed(plan.order))


def _reordered(inputs: DeltaInputs, order: tuple[Tensor, Tensor] | None) -> DeltaInputs:
    """The inputs of all tokens, level by level."""
    return inputs if order is None else DeltaInputs(*(_Permute.apply(x, *order) for x in inputs))


class _Permute(torch.autograd.Function):
    """x[order]; `back` is the inverse of `order`. The gradient is one copy, where that of an index
    that may name a row twice is sorted and summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.back), None, None


def _read(
    plan: SegmentPlan, states: tuple[Tensor, Tensor] | None
) -> tuple[Tensor | None, Tensor | None]:
    """Inputs before, and state at the beginning of each segment of the first level; None: zeros."""
    if plan.reads is None or states is None:
        return None, None
    segments, rows = plan.reads
    num_segments = len(plan.levels[0].lengths)
    inputs, recurrent = (
        x.new_zeros(num_segments, *x.shape[1:]).index_copy_(0, segments, x[rows]) for x in states
    )
    return inputs, recurrent


def _decode(
    inputs: DeltaInputs,
    weight: Tensor,
    heads: DeltaHeads,
    states: tuple[Tensor, Tensor],
    context: PagedContext,
) -> Tensor:
    rows, (tails, recurrent) = context.state_rows, states
    assert rows is not None, "decode needs the rows of its sequences' states"
    convolved, last = convolution.convolve_step(inputs.channels, weight, tails[rows])
    tokens = Tokens(*heads.split(convolved), inputs.g, inputs.beta)
    output, state = delta_rule.step(tokens, recurrent[rows])
    tails.index_copy_(0, rows, last.to(tails.dtype))
    recurrent.index_copy_(0, rows, state)
    return output
