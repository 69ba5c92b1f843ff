"""The causal convolution of each channel over the last W tokens, with silu, in plain torch.

Letters: T tokens, S segments, C channels, W weights of a channel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["convolve", "convolve_step"]


def convolve(
    x: Tensor, weight: Tensor, lengths: Sequence[int], initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs [T, C] of inputs x [T, C] in segments of the given `lengths`, and the last inputs
    [S, W - 1, C] of each segment. `initial` has the inputs [S, W - 1, C] before each segment; None:
    zeros. weight is [C, W]. Differentiable. Rounds as transformers does: the sum over the tokens,
    and after silu."""
    wide = torch.promote_types(x.dtype, torch.float32)
    window = weight.shape[1] - 1
    num_segments = len(lengths)
    if initial is None:
        initial = x.new_zeros(num_segments, window, x.shape[1])
    sizes = torch.tensor(lengths)
    # Inputs of all segments end to end, each behind those before it.
    numbers = torch.repeat_interleave(torch.arange(num_segments), sizes)
    places = (torch.arange(len(x)) + window * (numbers + 1)).to(x.device)
    ends = sizes.cumsum(0) + window * torch.arange(1, num_segments + 1)
    backs = torch.arange(-window, 0)
    heads = ((ends - sizes)[:, None] + backs).flatten().to(x.device)
    tails = (ends[:, None] + backs).flatten().to(x.device)
    padded = x.new_zeros(len(x) + window * num_segments, x.shape[1])
    padded = padded.index_copy(0, places, x).index_copy(0, heads, initial.to(x.dtype).flatten(0, 1))
    total = padded[places].to(wide) * weight[:, window]
    for back in range(1, window + 1):
        total = total + padded[places - back].to(wide) * weight[:, window - back]
    return F.silu(total.to(x.dtype)), padded[tails].unflatten(0, (num_segments, window))


def convolve_step(x: Tensor, weight: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [S, C] of one token x [S, C] of each sequence behind the inputs `before`
    [S, W - 1, C], and the inputs before the next token."""
    wide = torch.promote_types(x.dtype, torch.float32)
    window = torch.cat((before, x[:, None]), 1)
    return F.silu((window.to(wide) * weight.T).sum(1).to(x.dtype)), window[:, 1:]
