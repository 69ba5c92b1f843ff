"""Attention of packed rows in which several completions share one copy of their prompt.

A group of n samples repeats its prompt n times in ordinary packing. Here the prompt is laid out
once, and two sets of blocks give the same numbers:

    every piece on itself          prompts, completions, other sequences: causal
    completions on their prompt    the queries of all completions of a prompt, one full rectangle

The outputs are merged by their log-sum-exps. The gradients of a prompt's keys and values come from
its own tokens and from each completion.

Pieces lie as `SharedPrompts` says, so both sides of the rectangles are slices of the row, and no
token is copied. The trainer packs no rows like this: with prompts of 128 and completions of 1,024
tokens it was slower than repeating the prompt (`benchmarks/README.md`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice, pairwise
from typing import Any

import torch
from torch import Tensor

from hone.attention.blocks import AttentionBlock, visible_rectangles
from hone.attention.merging import add_key_gradients, attend_blocks, block_gradients

__all__ = ["SharedPrompts", "packed_attention"]


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """A packed row in pieces: all prompts, then the completions of each prompt in turn, then
    sequences of one piece. Raises ValueError for a prompt without a completion."""

    lengths: tuple[int, ...]  # of the pieces
    num_completions: tuple[int, ...]  # of each prompt

    def __post_init__(self) -> None:
        num_others = len(self.lengths) - len(self.num_completions)
        if min(self.num_completions, default=0) < 1 or sum(self.num_completions) > num_others:
            raise ValueError(
                f"each shared prompt needs a completion: {self.num_completions=} does not go with "
                f"{len(self.lengths)} pieces"
            )

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest sequence, its prompt included."""
        pieces = iter(self.lengths[len(self.num_completions) :])
        whole = [
            prompt + max(islice(pieces, count))
            for prompt, count in zip(self.lengths, self.num_completions, strict=False)
        ]
        return max([*whole, *pieces])


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SharedPrompts,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention within each packed sequence, its shared prompt included; differentiable.

    q is [T, Hq, D], k and v [T, Hkv, D]. Returns [T, Hq, D]. A window shorter than the longest
    sequence takes a call or two for each completion, otherwise it is one for all.
    """
    if window is not None and window >= layout.max_seqlen:
        window = None
    blocks = _blocks(layout.lengths, layout.num_completions, window, q.device)
    return _Attention.apply(q, k, v, _Call(blocks, scale, softcap))


@dataclass(frozen=True, slots=True)
class _Call:
    blocks: tuple[AttentionBlock, ...]
    scale: float
    softcap: float | None

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.scale, "softcap": self.softcap}


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
        merged = attend_blocks(q, k, v, call.blocks, **call.options)
        assert merged is not None
        output, lse = merged
        output = output.to(q.dtype)
        ctx.call = call
        ctx.save_for_backward(q, k, v, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        call: _Call = ctx.call
        q, k, v, output, lse = ctx.saved_tensors
        grad_q = torch.zeros_like(q, dtype=lse.dtype)
        grad_kv = torch.zeros((2, *k.shape), dtype=lse.dtype, device=k.device)
        shares = block_gradients(
            grads[0].contiguous(),
            q,
            k,
            v,
            call.blocks,
            output=output,
            lse=lse,
            grad_q=grad_q,
            **call.options,
        )
        add_key_gradients(grad_kv, shares)
        grad_k, grad_v = grad_kv.to(k.dtype).unbind(0)
        return grad_q.to(q.dtype), grad_k, grad_v, None


# The same for all layers that have the same window, in forward and in backward, hence the cache.
@lru_cache(maxsize=16)
def _blocks(
    lengths: tuple[int, ...],
    num_completions: tuple[int, ...],
    window: int | None,
    device: torch.device,
) -> tuple[AttentionBlock, ...]:
    """All tokens on their own pieces, then completions on their prompts."""
    left = -1 if window is None or window >= max(lengths) else window - 1
    tokens = range(sum(lengths))
    own = AttentionBlock.of(tokens, tokens, lengths=lengths, window=(left, 0), device=device)
    if window is None:
        return own, _on_prompts(lengths, num_completions, device)
    return own, *_windows_on_prompts(lengths, num_completions, window, device)


def _on_prompts(
    lengths: tuple[int, ...], num_completions: tuple[int, ...], device: torch.device
) -> AttentionBlock:
    """The completions of each prompt on all of it, in one block."""
    num_prompts = len(num_completions)
    prompt_lens = lengths[:num_prompts]
    ends = pairwise(accumulate(num_completions, initial=num_prompts))
    completion_lens = tuple(sum(lengths[first:last]) for first, last in ends)
    num_keys = sum(prompt_lens)
    return AttentionBlock.of(
        range(num_keys, num_keys + sum(completion_lens)),
        range(num_keys),
        lengths=completion_lens,
        key_lens=prompt_lens,
        window=(-1, -1),
        device=device,
    )


def _windows_on_prompts(
    lengths: tuple[int, ...], num_completions: tuple[int, ...], window: int, device: torch.device
) -> Iterator[AttentionBlock]:
    """Each completion on the end of its prompt that it sees through a sliding window."""
    pieces = [range(*ends) for ends in pairwise(accumulate(lengths, initial=0))]
    completions = iter(pieces[len(num_completions) :])
    for prompt, count in zip(pieces, num_completions, strict=False):
        for _ in range(count):
            completion = next(completions)
            # Positions are counted from the prompt's first token.
            positions = range(len(prompt), len(prompt) + len(completion))
            shift = completion.start - positions.start
            for queries, keys, visible in visible_rectangles(positions, range(len(prompt)), window):
                yield AttentionBlock.of(
                    range(queries.start + shift, queries.stop + shift),
                    range(keys.start + prompt.start, keys.stop + prompt.start),
                    window=visible,
                    device=device,
                )
