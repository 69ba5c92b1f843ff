"""Packed attention through FlashAttention 4 (the package `flash-attn-4`) on Hopper and Blackwell.

Its kernels are compiled when first called, some seconds for each direction, once for a dtype,
head size, number of query heads a key head, and windowed or not. Lengths and the number of
sequences are arguments of the compiled kernel, save that more than 256 sequences have kernels of
their own.

The calls go through an operator, `hone::flash4`, so that selective recompute can name what it
keeps. The library's entry points below it are the two that torch's own registry of flash kernels
relies on.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hone import flash4 as known
from hone.attention.context import PackedContext
from hone.errors import UserError

__all__ = ["is_usable", "packed_attention", "require_importable"]

TILE = 192
"""Queries or keys of the largest tile. If the longest sequence fits into one tile, other kernels
would be compiled. Kernels use the length only as an upper bound, so a larger one is given."""


def is_usable(device: torch.device, head_dim: int) -> bool:
    """Whether the library is installed and has kernels for this CUDA device and head size."""
    is_served = known.serves(head_dim) and _is_installed()
    return is_served and _architecture(device) in known.ARCHITECTURES


def require_importable() -> None:
    """Import the library, which takes seconds, before anything large is loaded. Raises UserError
    where it is installed but broken."""
    _kernels()


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, context: PackedContext, *, scale: float, window: int | None
) -> Tensor:
    """Causal attention within each packed sequence, differentiable.

    q is [T, Hq, D], k and v [K, Hkv, D], of the context's keys where it has some, else of the T
    tokens; float16 or bfloat16. Returns [T, Hq, D]. Gradients are bit-equal between runs only under
    `torch.use_deterministic_algorithms`. Raises UserError where the library is installed but
    broken.
    """
    keys = context.keys or context
    # The window does not count the token itself.
    left = None if window is None or window >= keys.max_seqlen else window - 1
    longest = max(keys.max_seqlen, TILE + 1)
    output, _ = _attend(q, k, v, context.cu_seqlens, keys.cu_seqlens, longest, scale, left)
    return output


@torch.library.custom_op(
    "hone::flash4",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor borders_q, Tensor borders_k, int longest, "
    "float scale, int? left) -> (Tensor, Tensor)",
)
def _attend(  # noqa: PLR0917  # an operator takes its arguments by position
    q: Tensor,
    k: Tensor,
    v: Tensor,
    borders_q: Tensor,
    borders_k: Tensor,
    longest: int,
    scale: float,
    left: int | None,
) -> tuple[Tensor, Tensor]:
    """Output [T, Hq, D] and log-sum-exp of the scores [Hq, T] float32."""
    rows = _rows(borders_q, borders_k, longest)
    output, lse, *_ = _kernels()._flash_attn_fwd(
        q, k, v, **rows, softmax_scale=scale, **_mask(left), return_lse=True
    )
    return output, lse


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, borders_q, borders_k, longest, scale, left = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, borders_q, borders_k, *output)
    ctx.longest, ctx.scale, ctx.left = longest, scale, left


def _differentiate(
    ctx: Any, grad: Tensor, grad_lse: None
) -> tuple[Tensor, Tensor, Tensor, None, None, None, None, None]:
    assert grad_lse is None  # no caller gets the log-sum-exp
    q, k, v, borders_q, borders_k, output, lse = ctx.saved_tensors
    grad_q, grad_k, grad_v = _kernels()._flash_attn_bwd(
        q,
        k,
        v,
        output,
        grad,
        lse,
        **_rows(borders_q, borders_k, ctx.longest),
        softmax_scale=ctx.scale,
        **_mask(ctx.left),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        dq=_empty_by_heads(q),
        dk=_empty_by_heads(k),
        dv=_empty_by_heads(v),
    )
    return grad_q, grad_k, grad_v, None, None, None, None, None


_attend.register_autograd(_differentiate, setup_context=_save)


def _empty_by_heads(x: Tensor) -> Tensor:
    """Empty gradient of x [T, H, D], stored head by head, as compiled layers expect it: they would
    copy any other memory order."""
    num_tokens, num_heads, head_dim = x.shape
    return x.new_empty(num_heads, num_tokens, head_dim).transpose(0, 1)


def _rows(borders_q: Tensor, borders_k: Tensor, longest: int) -> dict[str, Any]:
    """Arguments of the rows: no sequence has more queries or keys than `longest`."""
    return {
        "cu_seqlens_q": borders_q,
        "cu_seqlens_k": borders_k,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


def _mask(left: int | None) -> dict[str, Any]:
    return {"causal": True, "window_size_left": left}


@cache
def _is_installed() -> bool:
    return known.is_installed()


@cache
def _architecture(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


@cache
def _kernels() -> Any:
    try:
        return importlib.import_module(known.MODULE)
    except (ImportError, AttributeError, OSError) as error:
        raise UserError(known.broken(f"{error}")) from error
