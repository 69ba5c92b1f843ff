"""The attention function registered with transformers under the name `hone`.

Every decoder of transformers that uses the attention interface calls `attention` with its queries,
keys and values; the context in the forward's keyword arguments says whether this is training
(packed) or generation (paged). There is no default: a forward without a context is an error,
since plain causal attention over packed rows would silently mix the samples.

No mask function is registered for `hone`. Transformers then builds no mask at all, which also
spares it the search for packed sequences in `position_ids`, a wait for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from hone.attention import backends
from hone.attention.backends import calibrate_scales, paged_attention, write_kv
from hone.attention.context import PackedContext, PagedContext

__all__ = ["ATTENTION_NAME", "attend_paged", "attention"]

ATTENTION_NAME = "hone"
"""Value of `attn_implementation` that selects `attention`."""


# A compiled layer leaves the compiler here: tracing would specialise on the sequence lengths and
# compile again for every batch.
@torch.compiler.disable
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    attention_context: PackedContext | PagedContext | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of packed tokens, within each sequence or against its paged keys.

    query is [1, Hq, T, D], key and value [1, Hkv, T, D]. Returns [1, T, Hq, D] and no weights.
    Collective where the row is split over processes (`PackedContext.parallel`), backward too.
    Raises ValueError where the context is missing or a feature is asked for that is not served.
    """
    if not isinstance(attention_context, PackedContext | PagedContext):
        raise ValueError(
            "attention needs attention_context=PackedContext(...) or PagedContext(...) among the "
            f"forward's arguments, got {type(attention_context).__name__}; "
            "use hone.models.decoder.hidden_states"
        )
    _refuse_unserved(query, attention_mask, dropout=dropout, sinks=sinks)
    _check_tokens(query.shape[2], attention_context)
    # Not `x[0]`, whose gradient is copied into zeros.
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [T, H, D]
    options: dict[str, Any] = {"scale": scaling, "window": sliding_window, "softcap": softcap}
    if isinstance(attention_context, PackedContext):
        attend = backends.packed_attention
        if attention_context.parallel is not None:
            from hone.attention import context_parallel

            attend = context_parallel.packed_attention
        output = attend(q, k, v, attention_context, **options)
    elif q.requires_grad:
        raise ValueError("paged attention has no gradient: run it under torch.inference_mode()")
    else:
        output = attend_paged(q, k, v, _layer_index(module), attention_context, **options)
    return output.unsqueeze(0), None


def attend_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_index: int,
    context: PagedContext,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    write: bool = True,
) -> Tensor:
    """One layer of generation: store the newest keys and values, then attend.

    q is [T, Hq, D], k and v [T, Hkv, D], each with contiguous heads. With `write` False the cache
    already holds k and v, quantised with the layer's `kv_scales` where it is FP8; k and v are then
    read where no earlier keys exist. Returns [T, Hq, D]. Raises ValueError where the context
    calibrates scales and the keys are already written.
    """
    if context.calibrate and not write:
        raise ValueError(
            "a calibrating step sets the scales before it writes: call with write=True"
        )
    kv_cache = context.kv_caches[layer_index]
    scales = None if context.kv_scales is None else context.kv_scales[layer_index]
    if scales is not None and context.calibrate:
        calibrate_scales(k, v, scales)
    if write:
        write_kv(k, v, kv_cache, context.slot_mapping, scales)
    return paged_attention(
        q, k, v, kv_cache, context, scale=scale, scales=scales, window=window, softcap=softcap
    )


def _refuse_unserved(
    query: Tensor, attention_mask: Tensor | None, *, dropout: float, sinks: Tensor | None
) -> None:
    if attention_mask is not None:
        raise ValueError("packed attention takes no attention mask; borders come from the context")
    if query.shape[0] != 1:
        raise ValueError(f"sequences are packed into one row, got a batch of {query.shape[0]}")
    if dropout:
        raise ValueError(f"attention dropout is not served, got {dropout}; call model.eval()")
    if sinks is not None:
        raise ValueError("attention sinks are not served")


def _check_tokens(num_tokens: int, context: PackedContext | PagedContext) -> None:
    if num_tokens != context.num_tokens:
        raise ValueError(
            f"the {type(context).__name__} describes {context.num_tokens} tokens, "
            f"the forward has {num_tokens}"
        )


def _layer_index(module: nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise ValueError(f"{type(module).__name__} has no layer_idx: its KV cache is unknown")
    return index


AttentionInterface.register(ATTENTION_NAME, attention)
