"""The gated delta rule (Yang et al., arXiv:2412.06464) over segments laid end to end.

A head has a state S [K, V]. For each token, with decay a = exp(g) in (0, 1] and b = beta:

    S <- a S
    S <- S + k (b (v - k^T S))^T
    o  = q^T S / sqrt(K)

Queries and keys are divided by their norms first. `chunked` computes the same in chunks of 64
tokens: inside of a chunk by matrix products (the UT transform of section 3.3), from chunk to chunk
by the state. Letters: T tokens, S segments, C chunks, Hk key heads, H value heads, K and V sizes of
a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.segments import CHUNK

__all__ = ["UNIT_EPS", "Tokens", "chunked", "log_decay", "step", "unit"]

UNIT_EPS = 1e-6
"""What transformers and `fla` add to the squared norm of a query or key."""


def unit(x: Tensor) -> Tensor:
    """Vectors along the last dimension over their norms, as transformers and `fla` round them."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + UNIT_EPS)


def log_decay(a: Tensor, log_rate: Tensor, bias: Tensor) -> Tensor:
    """Log of the decay [T, H], -exp(log_rate) * softplus(a + bias), in float32 or wider. a is
    [T, H]; log_rate and bias are [H], the parameters `A_log` and `dt_bias`."""
    wide = torch.promote_types(log_rate.dtype, torch.float32)
    return -log_rate.to(wide).exp() * F.softplus(a.to(wide) + bias)


class Tokens(NamedTuple):
    """Inputs of the rule for T tokens."""

    q: Tensor  # [T, Hk, K]
    k: Tensor  # [T, Hk, K]
    v: Tensor  # [T, H, V], with a multiple of Hk heads
    g: Tensor  # [T, H], log of the decay, at most 0
    beta: Tensor  # [T, H], in (0, 1)


def step(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of S sequences behind the states [S, H, K, V]. Returns outputs [S, H, V] in
    the dtype of v, and the new states in that of the old ones."""
    q, k, v, g, beta = tokens
    dtype = state.dtype
    repeats = v.shape[1] // q.shape[1]
    q, k = (unit(x.to(dtype)).repeat_interleave(repeats, 1) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    state = state * g.to(dtype).exp()[..., None, None]
    known = torch.einsum("shk,shkv->shv", k, state)
    change = (v.to(dtype) - known) * beta.to(dtype)[..., None]
    state = state + k[..., None] * change[..., None, :]
    return torch.einsum("shk,shkv->shv", q, state).to(v.dtype), state


def chunked(
    tokens: Tokens, lengths: Sequence[int], initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs [T, H, V] in the dtype of v, and final states [S, H, K, V], of segments of the given
    `lengths`. `initial` has states [S, H, K, V]; None: zeros.

    Differentiable in all of them. Computes in float32, or in float64 where inputs have it.
    """
    q, k, v, g, beta = tokens
    dtype = torch.promote_types(v.dtype, torch.float32)
    repeats = v.shape[1] // q.shape[1]
    q, k = (unit(x.to(dtype)).repeat_interleave(repeats, 1) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    counts = [-(-length // CHUNK) for length in lengths]
    *starts, num_chunks = accumulate(counts, initial=0)  # number of each segment's first chunk
    places = _places(lengths, starts, v.device)

    def cut(x: Tensor) -> Tensor:
        """Values [T, H, ...] in chunks [C, H, CHUNK, ...], with zeros behind a segment's end."""
        padded = x.new_zeros(num_chunks * CHUNK, *x.shape[1:]).index_copy(0, places, x)
        return padded.unflatten(0, (num_chunks, CHUNK)).transpose(1, 2)

    q, k, values, g, beta = (cut(x.to(dtype)) for x in (q, k, v, g, beta))
    total = g.cumsum(-1)  # log of the decay since the chunk's beginning
    # Zero for later tokens: before `exp`, which would overflow there, and after it.
    pairs = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    kb, vb = k * beta[..., None], values * beta[..., None]
    system = (kb @ k.mT * pairs).tril(-1)
    solved = torch.linalg.solve_triangular(
        system, torch.cat((vb, kb * total.exp()[..., None]), -1), upper=False, unitriangular=True
    )
    own, from_state = solved.split((v.shape[-1], k.shape[-1]), -1)
    inside = q @ k.mT * pairs
    decayed_q = q * total.exp()[..., None]
    decayed_k = k * (total[..., -1:] - total).exp()[..., None]
    ending = total[..., -1].exp()[..., None, None]

    # From chunk to chunk, for all segments that still have one. Longest first, so that those are
    # always the first ones.
    order = sorted(range(len(counts)), key=lambda number: -counts[number])
    firsts = [starts[number] for number in order]
    shape = (len(counts), v.shape[1], k.shape[-1], v.shape[-1])
    state = values.new_zeros(shape) if initial is None else initial.to(dtype)[order]
    outputs: list[Tensor] = []
    finals: list[Tensor] = []
    chunks: list[int] = []  # in the order of `outputs`
    for number in range(max(counts)):
        alive = sum(count > number for count in counts)
        finals.append(state[alive:])
        state = state[:alive]
        now = [first + number for first in firsts[:alive]]
        chunks += now
        c = torch.tensor(now, device=v.device)
        new = own[c] - from_state[c] @ state
        outputs.append(decayed_q[c] @ state + inside[c] @ new)
        state = state * ending[c] + decayed_k[c].mT @ new
    finals.append(state)
    back = torch.empty(num_chunks, dtype=torch.int64)
    back[torch.tensor(chunks)] = torch.arange(num_chunks)
    output = torch.cat(outputs)[back.to(v.device)]
    ended = torch.cat(finals[::-1])  # the shortest ended first
    ranks = torch.empty(len(order), dtype=torch.int64)
    ranks[torch.tensor(order)] = torch.arange(len(order))
    flat = output.transpose(1, 2).flatten(0, 1)
    return flat[places].to(v.dtype), ended[ranks.to(v.device)]


def _places(lengths: Sequence[int], starts: Sequence[int], device: torch.device) -> Tensor:
    """Where each token lies among the padded chunks, [T] int64. `starts` are the numbers of the
    segments' first chunks."""
    parts = zip(lengths, starts, strict=True)
    return torch.cat([torch.arange(length) + start * CHUNK for length, start in parts]).to(device)
