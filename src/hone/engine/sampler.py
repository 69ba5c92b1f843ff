"""Sampling: tokens from logits, each with its log-probability under the distribution it was drawn
from.

The token of a request depends on its own logits, its seed and the number of tokens it has sampled,
never on the batch: one uniform number is hashed from (seed, position) and put through the inverse
cumulative distribution in vocabulary order. Letters: B sequences, V vocabulary.

Filters are applied in the order temperature, min-p, top-k, top-p, each on what the ones before it
left, as vLLM does. Greedy requests (temperature 0) report the log-probability without temperature
or filters.

This torch code serves CPUs and is the reference for the fused kernels that serve CUDA
(`sampling_kernels.py`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.engine.sampling_table import SamplingBatch, signed_64

__all__ = ["sample", "scale_and_filter", "uniforms"]

_UNIFORM_BITS = 48
_BLOCK_TOKENS = 128

_GAMMA = signed_64(0x9E3779B97F4A7C15)
_MIX_1 = signed_64(0xBF58476D1CE4E5B9)
_MIX_2 = signed_64(0x94D049BB133111EB)


def _shift_right(bits: Tensor, by: int) -> Tensor:
    return (bits >> by) & ((1 << (64 - by)) - 1)  # torch shifts int64 arithmetically


def _mix(bits: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele et al., OOPSLA 2014) on int64 tensors, whose arithmetic
    wraps."""
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    return bits ^ _shift_right(bits, 31)


def uniforms(seeds_B: Tensor, positions_B: Tensor) -> Tensor:
    """One float64 in [0, 1) for each (seed, position), both int64: a multiple of 2**-48."""
    stream = _mix(seeds_B + _GAMMA)  # neighbouring seeds must not give overlapping streams
    bits = _mix(stream + (positions_B + 1) * _GAMMA)
    return _shift_right(bits, 64 - _UNIFORM_BITS).double() * 2.0**-_UNIFORM_BITS


def scale_and_filter(logits_BV: Tensor, params: SamplingBatch) -> Tensor:
    """Logits of the distribution that is sampled from: tempered, dropped tokens at -inf.

    The most probable token is always kept. Ties at a border go to the lower token id.
    """
    logits_BV = logits_BV / params.temperatures
    if params.min_ps is None or params.top_ks is None or params.top_ps is None:
        return logits_BV
    least_B1 = logits_BV.amax(-1, keepdim=True) + params.min_ps.log()
    logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    sorted_BV, order_BV = torch.sort(logits_BV, stable=True, dim=-1, descending=True)
    drop_BV = torch.arange(sorted_BV.shape[-1], device=sorted_BV.device) >= params.top_ks
    probs_BV = sorted_BV.masked_fill(drop_BV, -torch.inf).softmax(-1)
    before_BV = probs_BV.cumsum(-1) - probs_BV  # mass of the more probable tokens
    reached_BV = (before_BV >= params.top_ps) & (params.top_ps < 1)
    reached_BV[:, 0] = False
    drop_BV = drop_BV | reached_BV
    return logits_BV.masked_fill(drop_BV.scatter(-1, order_BV, drop_BV), -torch.inf)


def sample(logits_BV: Tensor, params: SamplingBatch, positions_B: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token for each row of float logits: by fused kernels on CUDA, else by torch.

    `positions_B` (int64) counts the tokens each sequence has sampled before. Returns token ids
    [B] int64 and their log-probabilities [B] float32, NaN where logits are not numbers.
    """
    if logits_BV.is_cuda:
        from hone.engine import sampling_kernels

        return sampling_kernels.sample(logits_BV, params, positions_B)
    logits_BV = logits_BV.float()
    logprobs_BV = scale_and_filter(logits_BV, params).log_softmax(-1)
    token_ids_B1 = _invert(logprobs_BV.exp(), uniforms(params.seeds, positions_B).unsqueeze(-1))
    best_B1 = logits_BV.argmax(-1, keepdim=True)
    token_ids_B1 = torch.where(params.greedy.unsqueeze(-1), best_B1, token_ids_B1)
    return token_ids_B1.squeeze(-1), logprobs_BV.gather(-1, token_ids_B1).squeeze(-1)


def _invert(probs_BV: Tensor, uniforms_B1: Tensor) -> Tensor:
    """Inverse cumulative distribution: the token [B, 1] at each uniform number; never one of
    probability 0.

    In two levels: the masses of blocks of the vocabulary tell the block, and only its own tokens
    are added up one by one. Running sums are float64, since the steps of a float32 sum over a large
    vocabulary would swallow improbable tokens. C tokens a block, K blocks.
    """
    vocab_size = probs_BV.shape[-1]
    if vocab_size % _BLOCK_TOKENS:
        probs_BV = F.pad(probs_BV, (0, -vocab_size % _BLOCK_TOKENS))
    probs_BKC = probs_BV.unflatten(-1, (-1, _BLOCK_TOKENS))
    masses_BK = probs_BKC.sum(-1).double()
    ends_BK = masses_BK.cumsum(-1)
    levels_B1 = uniforms_B1 * ends_BK[:, -1:]
    # NaN probabilities never reach the level; the log-probability is then NaN, too.
    blocks_B1 = torch.searchsorted(ends_BK, levels_B1, right=True).clamp_(max=ends_BK.shape[-1] - 1)
    inside_BC = probs_BKC.take_along_dim(blocks_B1.unsqueeze(-1), 1).squeeze(1).double().cumsum(-1)
    left_B1 = ends_BK.gather(-1, blocks_B1) - levels_B1
    total_B1 = inside_BC[:, -1:]
    levels_B1 = total_B1 * (1 - left_B1 / masses_BK.gather(-1, blocks_B1))
    # Rounding must not push the level out of the block, past its last possible token.
    zero_B1 = torch.zeros_like(total_B1)
    levels_B1 = levels_B1.clamp(zero_B1, torch.nextafter(total_B1, zero_B1))
    token_ids_B1 = torch.searchsorted(inside_BC, levels_B1, right=True)
    return (blocks_B1 * _BLOCK_TOKENS + token_ids_B1).clamp_(max=vocab_size - 1)
