# pyright: reportMissingImports=false
"""The gated delta rule by the kernels of `fla-core` 0.6, with gradients.

Where the package refuses its own backward (`chunk_gradients`), the same kernels run around the
part that is computed here instead. Letters: T tokens, S segments, Hk key heads, H value heads, K
and V sizes of a head.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from fla.modules.norm.l2norm import l2norm_bwd, l2norm_fwd
from fla.ops.common.chunk_delta_h import (
    chunk_gated_delta_rule_bwd_dhu,
    chunk_gated_delta_rule_fwd_h,
)
from fla.ops.common.chunk_o import chunk_bwd_dv_local
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd
from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd, recompute_w_u_fwd
from fla.ops.utils import chunk_local_cumsum
from torch import Tensor

from hone.attention.recurrent.chunk_gradients import ChunkInputs, chunk_gradients
from hone.attention.recurrent.delta_rule import Tokens
from hone.segments import CHUNK, SegmentLevel

__all__ = ["gated_delta_rule", "has_own_backward"]


@lru_cache
def has_own_backward(device: torch.device) -> bool:
    """Whether the package's backward is right on this device."""
    import triton

    version = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:3])
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    return not (is_hopper and (3, 4) <= version < (3, 7, 1))


def gated_delta_rule(
    tokens: Tokens, level: SegmentLevel, initial: Tensor | None, *, gives_final: bool
) -> tuple[Tensor, Tensor | None]:
    """Outputs [T, H, V] and final states [S, H, K, V] in float32, None unless `gives_final`."""
    if torch.is_grad_enabled() and not has_own_backward(tokens.v.device):
        options = (level.cu_seqlens, level.chunks, gives_final)
        apply: Any = _Rule.apply
        return apply(*(x.contiguous() for x in tokens), initial, *options)
    output, final = chunk_gated_delta_rule(
        *(x[None] for x in tokens),
        initial_state=initial,
        output_final_state=gives_final,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=level.cu_seqlens,
        chunk_indices=level.chunks,  # which it would otherwise compute and send, waiting for it
    )
    return output[0], final


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor | None]:
        q, k, v, g, beta, initial, cu_seqlens, chunks, gives_final = args
        q, q_scale = l2norm_fwd(q[None])
        k, k_scale = l2norm_fwd(k[None])
        scale = k.shape[-1] ** -0.5
        log2_decays, output, solved, final, *_ = chunk_gated_delta_rule_fwd(
            q=q,
            k=k,
            v=v[None],
            g=g[None],
            beta=beta[None],
            scale=scale,
            initial_state=initial,
            output_final_state=gives_final,
            cu_seqlens=cu_seqlens,
            chunk_indices=chunks,
        )
        ctx.save_for_backward(
            q, q_scale, k, k_scale, v, log2_decays, beta, solved, initial, cu_seqlens, chunks
        )
        ctx.scale, ctx.g_dtype = scale, g.dtype
        return output[0].to(v.dtype), final

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        do, d_final = grads
        q, q_scale, k, k_scale, v, log2_decays, beta, solved, initial, cu_seqlens, chunks = (
            ctx.saved_tensors
        )
        do, v, beta = do.contiguous()[None], v[None], beta[None]
        packed = {"cu_seqlens": cu_seqlens, "chunk_indices": chunks}
        w, u = recompute_w_u_fwd(k=k, v=v, beta=beta, A=solved, g=log2_decays, **packed)
        h, new_values, _ = chunk_gated_delta_rule_fwd_h(
            k=k,
            w=w,
            u=u,
            g=log2_decays,
            initial_state=initial,
            output_final_state=False,
            **packed,
        )
        dv = chunk_bwd_dv_local(q=q, k=k, g=log2_decays, do=do, scale=ctx.scale, **packed)
        dh, d_initial, dv = chunk_gated_delta_rule_bwd_dhu(
            q=q,
            k=k,
            w=w,
            g=log2_decays,
            h0=initial,
            dht=d_final,
            do=do,
            dv=dv,
            scale=ctx.scale,
            **packed,
        )
        inputs = ChunkInputs(*(x[0] for x in (q, k, new_values, do, dv, log2_decays, h, dh)))
        dq, dk, dw, dg = chunk_gradients(inputs, cu_seqlens, chunks, ctx.scale)
        dq, dk, dw, dg = (x[None] for x in (_of_key_heads(dq, k), _of_key_heads(dk, k), dw, dg))
        dk_more, dv, dbeta, dg_more = prepare_wy_repr_bwd(
            k=k, v=v, beta=beta, g=log2_decays, A=solved, dw=dw, du=dv, **packed
        )
        dg = chunk_local_cumsum(dg + dg_more, chunk_size=CHUNK, reverse=True, **packed)
        dq = l2norm_bwd(q, q_scale, dq)
        dk = l2norm_bwd(k, k_scale, dk + dk_more)
        return (
            dq[0],
            dk[0],
            dv[0].to(v.dtype),
            dg[0].to(ctx.g_dtype),
            dbeta[0].to(beta.dtype),
            d_initial,
            None,
            None,
            None,
        )


def _of_key_heads(x: Tensor, keys: Tensor) -> Tensor:
    """Gradients [T, Hk, K] of key heads: the sums of those [T, H, K] of the value heads that each
    serves. `keys` are [1, T, Hk, K]."""
    num_key_heads = keys.shape[2]
    if x.shape[1] == num_key_heads:
        return x
    return x.unflatten(1, (num_key_heads, -1)).sum(2)
