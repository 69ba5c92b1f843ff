"""Recurrent layers token by token and head by head, in the dtype of the inputs: what is right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hone.attention.recurrent.delta_rule import Tokens


def draw_tokens(
    num_tokens: int,
    *,
    heads: tuple[int, int] = (1, 1),
    dims: tuple[int, int] = (4, 4),
    dtype: torch.dtype = torch.float64,
) -> Tokens:
    """Random inputs that need gradients, for `heads` of keys and of values of these `dims`. Decays
    are anything between almost none and almost all."""
    (num_keys, num_values), (key_dim, value_dim) = heads, dims
    g = -torch.exp(3 * torch.randn(num_tokens, num_values, dtype=dtype))
    inputs = (
        torch.randn(num_tokens, num_keys, key_dim, dtype=dtype),
        torch.randn(num_tokens, num_keys, key_dim, dtype=dtype),
        torch.randn(num_tokens, num_values, value_dim, dtype=dtype),
        g,
        torch.rand(num_tokens, num_values, dtype=dtype),
    )
    return Tokens(*(x.requires_grad_() for x in inputs))


def draw_states(num_segments: int, tokens: Tokens) -> Tensor:
    shape = num_segments, tokens.v.shape[1], tokens.k.shape[2], tokens.v.shape[2]
    return torch.randn(shape, dtype=tokens.v.dtype, requires_grad=True)


def rule(tokens: Tokens, lengths: Sequence[int], initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `delta_rule.chunked`."""
    num_values, (key_dim, value_dim) = tokens.v.shape[1], (tokens.k.shape[2], tokens.v.shape[2])
    repeats = num_values // tokens.k.shape[1]
    outputs: list[Tensor] = []
    finals: list[Tensor] = []
    start = 0
    for number, length in enumerate(lengths):
        states = []
        rows = [[] for _ in range(length)]
        for head in range(num_values):
            state = tokens.v.new_zeros(key_dim, value_dim)
            if initial is not None:
                state = initial[number, head]
            for place, t in enumerate(range(start, start + length)):
                q, k = (x[t, head // repeats] for x in (tokens.q, tokens.k))
                q = q / (q.square().sum() + 1e-6).sqrt() / key_dim**0.5
                k = k / (k.square().sum() + 1e-6).sqrt()
                state = tokens.g[t, head].exp() * state
                change = tokens.beta[t, head] * (tokens.v[t, head] - k @ state)
                state = state + torch.outer(k, change)
                rows[place].append(q @ state)
            states.append(state)
        outputs += [torch.stack(row) for row in rows]
        finals.append(torch.stack(states))
        start += length
    return torch.stack(outputs), torch.stack(finals)


def convolve(
    x: Tensor, weight: Tensor, lengths: Sequence[int], initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `convolution.convolve`."""
    width = weight.shape[1]
    outputs: list[Tensor] = []
    lasts: list[Tensor] = []
    start = 0
    for number, length in enumerate(lengths):
        before = x.new_zeros(width - 1, x.shape[1]) if initial is None else initial[number]
        seen = [*before, *x[start : start + length]]
        for t in range(length):
            total = sum(seen[t + i] * weight[:, i] for i in range(width))
            outputs.append(total * total.sigmoid())
        lasts.append(torch.stack(seen[len(seen) - (width - 1) :]))
        start += length
    return torch.stack(outputs), torch.stack(lasts)
