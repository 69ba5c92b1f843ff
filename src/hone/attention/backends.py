"""Choice of the attention implementation: torch on a CPU, flash and Triton kernels on CUDA.

The two `choose_` functions are the whole rule, so that a run can print what it will use. Kernels
are imported only when they are called.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from hone.attention import reference
from hone.attention.context import FP8_DTYPE, PackedContext, PagedContext
from hone.attention.packed_keys import gather_keys
from hone.types import PackedKeys, Spans

if TYPE_CHECKING:
    from hone.attention.blocks import AttentionBlock

__all__ = [
    "attend_block",
    "block_gradients",
    "calibrate_scales",
    "choose_packed_backend",
    "choose_paged_backend",
    "packed_attention",
    "paged_attention",
    "write_kv",
]

CALIBRATION_HEADROOM = 4.0
"""Factor by which values may exceed those of the first prompts under a weight version. FP8 has the
same precision over four orders of magnitude below the largest value, so this costs none."""


def choose_packed_backend(
    device: torch.device, dtype: torch.dtype, *, head_dim: int, softcap: float | None
) -> Literal["flash4", "flash", "reference"]:
    """Backend of training and prefill.

    FlashAttention supports 16-bit floats on CUDA, heads up to 256 and sliding windows, but no soft
    cap; all other cases use plain torch. FlashAttention 4 is used in training if it is installed
    and has kernels for the device; cases it does not support go to FlashAttention 2.
    """
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return "reference"
    from hone.attention import flash, flash4

    if softcap is not None or head_dim > flash.MAX_HEAD_DIM:
        return "reference"
    return "flash4" if flash4.is_usable(device, head_dim) else "flash"


@lru_cache
def choose_paged_backend(device: torch.device) -> Literal["triton", "reference"]:
    """Backend of decode and of the KV write: Triton on CUDA if it is installed."""
    return "triton" if device.type == "cuda" and find_spec("triton") else "reference"


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: PackedContext,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention within each packed sequence, in both directions within spans; q [T, Hq, D],
    k and v [T, Hkv, D]. For whole sequences on one process; `context_parallel` handles split
    rows."""
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    output = _packed_causal(q, k, v, context, **options)
    if (spans := context.spans) is None:
        return output
    assert isinstance(spans.keys, PackedKeys)
    # Earlier keys are copied once for each span, since the kernels read keys end to end.
    k, v = gather_keys(k, v, spans.keys)
    return _within_spans(output, q, k, v, spans, **options)


def _packed_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: PackedContext,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    backend, keys = _packed_backend(q, softcap), context.keys
    if keys is not None:
        k, v = gather_keys(k, v, keys)
    if backend != "reference":
        from hone.attention import flash, flash4

        attend = (flash4 if backend == "flash4" else flash).packed_attention
        return attend(q, k, v, context, scale=scale, window=window)
    return reference.packed_attention(
        q,
        k,
        v,
        context.lengths,
        None if keys is None else keys.lengths,
        scale=scale,
        window=window,
        softcap=softcap,
    )


def _within_spans(
    output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Spans,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """The output [T, Hq, D] of causal attention with that of spans in its place; k and v
    [K, Hkv, D] are the keys and values of the spans. Differentiable."""
    q = q.index_select(0, spans.index)
    if _packed_backend(q, softcap) == "reference":
        attended = reference.span_attention(
            q,
            k,
            v,
            spans.lengths,
            spans.keys.lengths,
            scale=scale,
            window=window,
            softcap=softcap,
        )
    else:
        # Also where FlashAttention 4 serves the causal part: its kernels are tried with windows
        # that end at the query.
        from hone.attention import flash

        attended = flash.span_attention(q, k, v, spans, scale=scale, window=window)
    return output.index_copy(0, spans.index, attended)


def attend_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: AttentionBlock,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention to a part of the keys. Returns the output [Tq, Hq, D] and the log-sum-exp of the
    scores [Hq, Tq], float32 or wider. q, k and v are the block's own rows."""
    if _packed_backend(q, softcap) != "reference":
        from hone.attention import flash

        return flash.attend_block(q, k, v, block, scale=scale)
    from hone.attention import blocks

    return blocks.attend(q, k, v, block, scale=scale, softcap=softcap)


def block_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: AttentionBlock,
    *,
    output: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The block's share of the gradients of q, k and v, given that of the output.

    Output [Tq, Hq, D] and log-sum-exp [Hq, Tq] are those over *all* keys of these queries.
    """
    whole = {"output": output, "lse": lse}
    if _packed_backend(q, softcap) != "reference":
        from hone.attention import flash

        return flash.block_gradients(grad, q, k, v, block, **whole, scale=scale)
    from hone.attention import blocks

    return blocks.gradients(grad, q, k, v, block, **whole, scale=scale, softcap=softcap)


def calibrate_scales(k: Tensor, v: Tensor, scales: Tensor) -> None:
    """Set scales [2, Hkv] from keys and values k and v, [T, Hkv, D].

    The largest magnitude of a head takes a quarter of the FP8 range: later tokens may be four times
    as large before they saturate. A head of zeros gets scale 1.
    """
    largest = torch.stack([x.abs().amax((0, 2)) for x in (k, v)]).float()
    scale = largest * (CALIBRATION_HEADROOM / torch.finfo(FP8_DTYPE).max)
    scales.copy_(torch.where(scale > 0, scale, 1.0))


def write_kv(
    k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, scales: Tensor | None = None
) -> None:
    """Store keys and values [T, Hkv, D] at their slots of the cache; slot -1 stores nothing. With
    `scales` [2, Hkv] they are divided by their head's scale and saturate at the FP8 range."""
    if choose_paged_backend(k.device) == "triton":
        from hone.attention import triton_write  # needs triton, absent on CPUs

        triton_write.write_kv(k, v, kv_cache, slot_mapping, scales)
    else:
        reference.write_kv(k, v, kv_cache, slot_mapping, scales)


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    context: PagedContext,
    *,
    scale: float,
    scales: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of the newest tokens to their paged keys, which are already written.

    q is [T, Hq, D]. k and v [T, Hkv, D] are the newest keys, read directly if no earlier ones
    exist; spans read theirs from the cache. scales [2, Hkv] are those of an FP8 cache. Returns
    [T, Hq, D].
    """
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    output = _paged_causal(q, k, v, kv_cache, context, scales=scales, **options)
    if (spans := context.spans) is None:
        return output
    flat = kv_cache.view(2, -1, *kv_cache.shape[3:])
    k, v = reference.gather_kv(flat, 1, spans.keys.index, scales, q.dtype).unbind(0)
    return _within_spans(output, q, k, v, spans, **options)


def _paged_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    context: PagedContext,
    *,
    scales: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    if context.is_decode and choose_paged_backend(q.device) == "triton":
        from hone.attention import triton_decode  # needs triton, absent on CPUs

        return triton_decode.decode_attention(
            q,
            kv_cache,
            context.block_tables,
            context.context_lens,
            context.max_context_len,
            scales=scales,
            shared=context.shared,
            **options,
        )
    if not context.is_decode:
        if _packed_backend(q, softcap) != "reference":
            from hone.attention import flash

            return flash.prefill_attention(
                q, k, v, kv_cache, context, scale=scale, scales=scales, window=window
            )
        if not context.has_prefix:
            return reference.packed_attention(q, k, v, context.query_lens, **options)
    return reference.paged_attention(q, kv_cache, context, scales, **options)


def _packed_backend(q: Tensor, softcap: float | None) -> Literal["flash4", "flash", "reference"]:
    return choose_packed_backend(q.device, q.dtype, head_dim=q.shape[-1], softcap=softcap)
