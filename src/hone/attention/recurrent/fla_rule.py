# pyright: reportMissingImports=false
"""The gated delta rule by the kernels of `fla-core` 0.6, with gradients.

What happens inside of chunks is computed for all tokens of a pass at once; states are handed on
from chunk to chunk for one level of segments after the other (`state_passes`). Letters: T tokens,
S segments, of which the first level has s, Hk key heads, H value heads, K and V sizes of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from fla.modules.norm.l2norm import l2norm_bwd_kernel, l2norm_fwd_kernel
from fla.ops.common.chunk_o import chunk_bwd_dv_local, chunk_fwd_o
from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd, recompute_w_u_fwd
from fla.ops.utils import chunk_local_cumsum
from fla.ops.utils.constant import RCP_LN2
from torch import Tensor

from hone.attention.kernel_launch import next_power_of_2
from hone.attention.recurrent.chunk_gradients import ChunkInputs, chunk_gradients
from hone.attention.recurrent.delta_rule import UNIT_EPS, Tokens
from hone.attention.recurrent.state_passes import (
    ChunkTokens,
    OutputGradients,
    pass_back,
    pass_on,
)
from hone.segments import CHUNK, SegmentPlan

__all__ = ["gated_delta_rule"]


def gated_delta_rule(
    tokens: Tokens, plan: SegmentPlan, stored: Tensor | None, *, gives_final: bool
) -> tuple[Tensor, Tensor | None]:
    """Outputs [T, H, V] and final states [S, H, K, V] in float32, None unless `gives_final`.
    `stored` are the initial states [s, H, K, V] of the first level; None: zeros. Differentiable."""
    apply: Any = _Rule.apply
    return apply(*(x.contiguous() for x in tokens), stored, plan, gives_final)


class _Rule(torch.autograd.Function):
    """Backward calls the kernels that the package's own backward calls, but for the one that it
    refuses to run on some GPUs (`chunk_gradients`)."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor | None]:
        q, k, v, g, beta, stored, plan, gives_final = args
        packed = _packed(plan)
        q, q_scale = _unit(q[None])
        k, k_scale = _unit(k[None])
        scale = k.shape[-1] ** -0.5
        log2_decays = chunk_local_cumsum(g[None], chunk_size=CHUNK, scale=RCP_LN2, **packed)
        w, u, solved = chunk_gated_delta_rule_fwd_intra(
            k=k, v=v[None], g=log2_decays, beta=beta[None], **packed
        )
        states = pass_on(ChunkTokens(k, w, u, log2_decays), plan, stored, gives_final=gives_final)
        output = chunk_fwd_o(
            q=q, k=k, v=states.new_values, h=states.h, g=log2_decays, scale=scale, **packed
        )
        ctx.save_for_backward(q, q_scale, k, k_scale, v, log2_decays, beta, solved, stored)
        ctx.scale, ctx.g_dtype, ctx.plan = scale, g.dtype, plan
        return output[0].to(v.dtype), states.finals if gives_final else None

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        do, d_finals = grads
        q, q_scale, k, k_scale, v, log2_decays, beta, solved, stored = ctx.saved_tensors
        plan: SegmentPlan = ctx.plan
        packed = _packed(plan)
        do, v, beta = do.contiguous()[None], v[None], beta[None]
        w, u = recompute_w_u_fwd(k=k, v=v, beta=beta, A=solved, g=log2_decays, **packed)
        tokens = ChunkTokens(k, w, u, log2_decays)
        states = pass_on(tokens, plan, stored, gives_final=False)
        dv = chunk_bwd_dv_local(q=q, k=k, g=log2_decays, do=do, scale=ctx.scale, **packed)
        given = OutputGradients(q, ctx.scale, do, dv, d_finals)
        dh, dv, d_stored = pass_back(tokens, plan, states, given)
        new_values, h = states.new_values, states.h
        inputs = ChunkInputs(*(x[0] for x in (q, k, new_values, do, dv, log2_decays, h, dh)))
        dq, dk, dw, dg = chunk_gradients(inputs, plan.cu_seqlens, plan.chunks, ctx.scale)
        dq, dk, dw, dg = (x[None] for x in (_of_key_heads(dq, k), _of_key_heads(dk, k), dw, dg))
        dk_more, dv, dbeta, dg_more = prepare_wy_repr_bwd(
            k=k, v=v, beta=beta, g=log2_decays, A=solved, dw=dw, du=dv, **packed
        )
        dg = chunk_local_cumsum(dg + dg_more, chunk_size=CHUNK, reverse=True, **packed)
        dq = _unit_gradient(q, q_scale, dq)
        dk = _unit_gradient(k, k_scale, dk + dk_more)
        return (
            dq[0],
            dk[0],
            dv[0].to(v.dtype),
            dg[0].to(ctx.g_dtype),
            dbeta[0].to(beta.dtype),
            d_stored,
            None,
            None,
        )


def _packed(plan: SegmentPlan) -> dict[str, Tensor]:
    """What the kernels would otherwise compute and send, waiting for it."""
    return {"cu_seqlens": plan.cu_seqlens, "chunk_indices": plan.chunks}


def _unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each x[..., :] times the inverse of its norm, and these inverses in float32."""
    y = torch.empty_like(x)
    inverse = x.new_empty(x.shape[:-1], dtype=torch.float32)
    l2norm_fwd_kernel[_row_grid(x)](x=x, y=y, rstd=inverse, **_row_sizes(x))
    return y, inverse


def _unit_gradient(y: Tensor, inverse: Tensor, dy: Tensor) -> Tensor:
    """The gradient of what `_unit` has made y of."""
    dx = torch.empty_like(y)
    l2norm_bwd_kernel[_row_grid(y)](y=y, rstd=inverse, dy=dy, dx=dx, **_row_sizes(y))
    return dx


def _row_grid(x: Tensor) -> Callable[[Mapping[str, int]], tuple[int]]:
    """Programs of a launch, by the rows `BT` that each serves."""
    return lambda launch: (-(-x.shape[:-1].numel() // launch["BT"]),)


def _row_sizes(x: Tensor) -> dict[str, Any]:
    """Arguments that both kernels share. The package's own functions count in `NB` how often 65,536
    goes into the rows. The kernels do not read it, but would be compiled again for each number."""
    size = x.shape[-1]
    num_rows = x.shape[:-1].numel()
    return {"eps": UNIT_EPS, "T": num_rows, "D": size, "BD": next_power_of_2(size), "NB": 1}


def _of_key_heads(x: Tensor, keys: Tensor) -> Tensor:
    """Gradients [T, Hk, K] of key heads: the sums of those [T, H, K] of the value heads that each
    serves. `keys` are [1, T, Hk, K]."""
    num_key_heads = keys.shape[2]
    if x.shape[1] == num_key_heads:
        return x
    return x.unflatten(1, (num_key_heads, -1)).sum(2)
