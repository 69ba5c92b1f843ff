"""Fused sampling for CUDA: logits to tokens and log-probabilities in one read of the logits.

`hone.models.token_logprobs` has the first kernel: it reads the logits and leaves the maximum and
the mass of every block of the vocabulary. Another merges them row by row, finds by the uniform
number the block and, reading that block alone once more, the token. It is the inverse of the
cumulative distribution in vocabulary order, as in `sampler.py`.

Filters keep a prefix of the tokens in the order of falling logits, ties by rising id, so each is
one pair: the lowest logit kept and the last id kept at it. That border is searched without sorting:
the maxima and masses of the blocks give a lower bound, bisection narrows the window above it until
its tokens fit into registers, and there the last step is exact. Then the sums of the blocks that
hold kept tokens are taken again.

As masses are integers, running sums never disagree with totals, and a token too improbable to count
is never drawn. A row has the same bits in any batch.

Letters: B rows, V vocabulary. The tensor that the kernels call `scale` is log2(e) / T.
This module imports triton; `hone.engine.sampler` imports it only where it is used.
"""
# A launch passes plain numbers for constexpr parameters and takes `num_warps`, which the types of
# triton do not know; kernels take their pointers by position. Operators of `tl.tensor` are untyped.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportReturnType=false, reportGeneralTypeIssues=false, reportUnnecessaryComparison=false
# ruff: noqa: PLR0917

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.engine.sampling_table import SamplingBatch
from hone.models.token_logprobs import (
    LOG2_E,
    ROW_WARPS,
    TILE_WARPS,
    UNIT,
    Rows,
    block_masses,
    block_sums,
    column,
    logprob_of,
    tile_of,
)

__all__ = ["sample"]

SEARCH_TILE_BLOCKS = 32
SEARCH_WARPS = 16
CANDIDATES = 4096
"""Number of tokens that fit into registers for the exact last step of the search."""

FLOOR_BITS = tl.constexpr(64.0)
"""A token this many bits less probable than the best has no mass."""
BOUND_STEPS = tl.constexpr(12)
GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)


def sample(logits_BV: Tensor, params: SamplingBatch, positions_B: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token for each row of logits (bfloat16, float16 or float32, dense rows).

    `params` as `SamplingTable.rows` gives them: temperatures and greedy always, filters all or
    none. `positions_B` (int64) counts the tokens each sequence has sampled before. Returns token
    ids [B] int64 and log-probabilities [B] float32, NaN where a row is not all numbers. Two
    kernels without filters; nothing waits for the device, so a CUDA graph can capture it.

    The kept set is that of `sampler.scale_and_filter` on the same device, but where a running sum
    meets top-p within rounding. Tokens less than 2**-64 times as probable as the best count as
    dropped by any filter. Float32 logits that become equal only by the division by T stay apart.
    """
    rows = Rows.of(logits_BV, params.temperatures)
    maxima, sums = block_sums(rows)
    borders_B = last_ids_B = None
    if params.top_ps is not None:
        borders_B, last_ids_B = _find_borders(rows, maxima, sums, params)
        _kept_sums_kernel[(rows.number * rows.num_tiles,)](
            sums,
            maxima,
            borders_B,
            last_ids_B,
            *rows.pointers,
            **rows.shape,
            num_warps=TILE_WARPS,
        )
    logprobs_B = torch.empty_like(maxima[:, 0])
    token_ids_B = torch.empty_like(logprobs_B, dtype=torch.int64)
    _draw_kernel[(rows.number,)](
        token_ids_B,
        logprobs_B,
        maxima,
        sums,
        borders_B,
        last_ids_B,
        *column(positions_B),
        *column(params.seeds),
        *column(params.greedy),
        *rows.pointers,
        **rows.shape,
        num_warps=ROW_WARPS,
    )
    return token_ids_B, logprobs_B


def _find_borders(
    rows: Rows, maxima: Tensor, sums: Tensor, params: SamplingBatch
) -> tuple[Tensor, Tensor]:
    """The lowest logit kept [B] float32, and the last id kept at it [B] int32; -inf keeps all."""
    assert params.min_ps is not None
    assert params.top_ks is not None
    assert params.top_ps is not None
    borders_B = torch.empty_like(maxima[:, 0])
    last_ids_B = torch.empty_like(borders_B, dtype=torch.int32)
    _border_kernel[(rows.number,)](
        borders_B,
        last_ids_B,
        maxima.new_empty(rows.number, CANDIDATES),
        maxima,
        sums,
        *column(params.min_ps.log()),
        *column(params.top_ks),
        *column(params.top_ps),
        *rows.pointers,
        **rows.shape | {"TILE_BLOCKS": SEARCH_TILE_BLOCKS},
        CANDIDATES=CANDIDATES,
        num_warps=SEARCH_WARPS,
    )
    return borders_B, last_ids_B


@triton.jit
def _kept_sums_kernel(
    sums_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    borders_ptr: tl.tensor,
    last_ids_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    row_stride: tl.tensor,
    temperatures_ptr: tl.tensor,
    temperature_stride: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
) -> None:
    """Sums of the blocks again, of kept tokens only, in rows that drop some."""
    row, block = tile_of(NUM_BLOCKS, TILE_BLOCKS)
    border, last_id = tl.load(borders_ptr + row), tl.load(last_ids_ptr + row)
    if border > float("-inf"):
        place = row * NUM_BLOCKS + block
        maximum = tl.load(maxima_ptr + place, mask=block < NUM_BLOCKS, other=float("-inf"))
        token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        reached = (maximum >= border)[:, None] & (token < VOCAB)
        logits = tl.load(logits_ptr + row * row_stride + token, mask=reached, other=float("-inf"))
        scale = LOG2_E / tl.load(temperatures_ptr + row * temperature_stride)
        logits = logits.to(tl.float32)
        finite = tl.where(maximum == float("-inf"), 0.0, maximum)
        weights = tl.exp2((logits - finite[:, None]) * scale)
        weights = tl.where(_is_kept(logits, token, border, last_id), weights, 0.0)
        tl.store(sums_ptr + place, tl.sum(weights, 1), mask=block < NUM_BLOCKS)


@triton.jit
def _draw_kernel(
    token_ids_ptr: tl.tensor,
    logprobs_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    borders_ptr: tl.tensor,
    last_ids_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    position_stride: tl.tensor,
    seeds_ptr: tl.tensor,
    seed_stride: tl.tensor,
    greedy_ptr: tl.tensor,
    greedy_stride: tl.tensor,
    logits_ptr: tl.tensor,
    row_stride: tl.tensor,
    temperatures_ptr: tl.tensor,
    temperature_stride: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row * temperature_stride)
    greedy = tl.load(greedy_ptr + row * greedy_stride)
    uniform = _uniform(
        tl.load(seeds_ptr + row * seed_stride).to(tl.uint64, bitcast=True),
        tl.load(positions_ptr + row * position_stride).to(tl.uint64, bitcast=True),
    )
    scale = LOG2_E / temperature
    maxima, masses, maximum = block_masses(maxima_ptr, sums_ptr, row, scale, NUM_BLOCKS, ALL_BLOCKS)
    total = tl.sum(masses, 0)

    ends = tl.cumsum(masses, 0)
    level = (uniform * total.to(tl.float64)).to(tl.int64)
    index = tl.arange(0, ALL_BLOCKS)
    best = tl.min(tl.where(maxima == maximum, index, NUM_BLOCKS), 0)
    block = tl.where(greedy, best, tl.sum((ends <= level).to(tl.int32), 0))
    block = tl.minimum(block, NUM_BLOCKS - 1)  # where the row is not all numbers
    level -= tl.sum(tl.where(index < block, masses, 0), 0)
    mass = tl.sum(tl.where(index == block, masses, 0), 0)
    block_maximum = tl.sum(tl.where(index == block, maxima, 0.0), 0)

    offset = tl.arange(0, BLOCK)
    token = block * BLOCK + offset
    logits = tl.load(
        logits_ptr + row * row_stride + token, mask=token < VOCAB, other=float("-inf")
    ).to(tl.float32)
    weights = tl.exp2((logits - block_maximum) * scale)
    if borders_ptr is not None:
        border, last_id = tl.load(borders_ptr + row), tl.load(last_ids_ptr + row)
        weights = tl.where(_is_kept(logits, token, border, last_id), weights, 0.0)
    weights = (weights * UNIT).to(tl.int64)
    ends = tl.cumsum(weights, 0)
    block_total = tl.sum(weights, 0)
    # The block's tokens add up to its mass but for rounding: the level moves in proportion.
    share = level.to(tl.float64) / mass.to(tl.float64)
    level = tl.minimum((share * block_total.to(tl.float64)).to(tl.int64), block_total - 1)
    best = tl.min(tl.where(logits == maximum, offset, BLOCK), 0)
    chosen = tl.where(greedy, best, tl.sum((ends <= level).to(tl.int32), 0))
    chosen = tl.minimum(chosen, tl.minimum(BLOCK, VOCAB - block * BLOCK) - 1)

    logit = tl.sum(tl.where(offset == chosen, logits, 0.0), 0)
    tl.store(token_ids_ptr + row, (block * BLOCK + chosen).to(tl.int64))
    tl.store(logprobs_ptr + row, logprob_of(logit, maximum, temperature, total))


@triton.jit
def _border_kernel(
    borders_ptr: tl.tensor,
    last_ids_ptr: tl.tensor,
    candidates_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    log_min_ps_ptr: tl.tensor,
    log_min_p_stride: tl.tensor,
    top_ks_ptr: tl.tensor,
    top_k_stride: tl.tensor,
    top_ps_ptr: tl.tensor,
    top_p_stride: tl.tensor,
    logits_ptr: tl.tensor,
    row_stride: tl.tensor,
    temperatures_ptr: tl.tensor,
    temperature_stride: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> None:
    """The last token kept in each row: its logit, and its id where others have the same logit.

    top-k and top-p are the same search. Each keeps tokens in falling order until their weights, 1
    or the mass, reach a target.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row * temperature_stride)
    log_min_p = tl.load(log_min_ps_ptr + row * log_min_p_stride)
    top_k = tl.load(top_ks_ptr + row * top_k_stride)
    top_p = tl.load(top_ps_ptr + row * top_p_stride)
    scale = LOG2_E / temperature
    maxima, masses, maximum = block_masses(maxima_ptr, sums_ptr, row, scale, NUM_BLOCKS, ALL_BLOCKS)
    total = tl.sum(masses, 0)
    logits_ptr += row * row_stride
    candidates_ptr += row * CANDIDATES
    maxima_ptr += row * NUM_BLOCKS

    has_min_p, has_top_k, has_top_p = log_min_p > float("-inf"), top_k < VOCAB, top_p < 1.0
    border = tl.full([], float("-inf"), tl.float32)
    last_id = tl.full([], VOCAB, tl.int32)
    if (total > 0) & (has_min_p | has_top_k | has_top_p):
        border = maximum - FLOOR_BITS / scale
        if has_min_p:
            border = tl.maximum(border, _min_p_border(maximum, temperature, log_min_p))
        for step in range(2):
            by_mass = step == 1
            if (by_mass & has_top_p) | ((step == 0) & has_top_k):
                kept = total
                target = top_k.to(tl.int64) * UNIT
                if by_mass:
                    if has_min_p | has_top_k:
                        _, kept = _scan(
                            candidates_ptr,
                            logits_ptr,
                            maxima_ptr,
                            maximum,
                            scale,
                            by_mass,
                            border,
                            last_id,
                            border,
                            float("inf"),
                            border,
                            VOCAB,
                            BLOCK,
                            NUM_BLOCKS,
                            TILE_BLOCKS,
                            CANDIDATES,
                        )
                    target = tl.ceil(top_p.to(tl.float64) * kept.to(tl.float64)).to(tl.int64)
                    target = tl.maximum(target, 1)
                low = _lower_bound(maxima, masses, maximum, scale, by_mass, border, target, BLOCK)
                border, last_id = _search(
                    candidates_ptr,
                    logits_ptr,
                    maxima_ptr,
                    maximum,
                    scale,
                    by_mass,
                    border,
                    last_id,
                    low,
                    target,
                    VOCAB,
                    BLOCK,
                    NUM_BLOCKS,
                    TILE_BLOCKS,
                    CANDIDATES,
                )
    tl.store(borders_ptr + row, border)
    tl.store(last_ids_ptr + row, last_id)


@triton.jit
def _search(
    candidates_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    maximum: tl.tensor,
    scale: tl.tensor,
    by_mass: tl.tensor,
    border: tl.tensor,
    last_id: tl.tensor,
    low: tl.tensor,
    target: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The border of the first tokens that weigh `target`, of those within the old border.

    It lies not below `low`. Where all of them do not weigh as much, all stay.
    """
    # The border lies in the window [low, high), and `above` is what the tokens over it weigh.
    high = _from_key(_key(maximum) + 1)
    above = tl.full([], 0, tl.int64)
    count = tl.full([], 0, tl.int32)
    is_wide = True
    while is_wide:
        middle = low + (high - low) * 0.5
        count, upper = _scan(
            candidates_ptr,
            logits_ptr,
            maxima_ptr,
            maximum,
            scale,
            by_mass,
            border,
            last_id,
            low,
            high,
            middle,
            VOCAB,
            BLOCK,
            NUM_BLOCKS,
            TILE_BLOCKS,
            CANDIDATES,
        )
        is_wide = (count > CANDIDATES) & (middle > low) & (middle < high)
        if is_wide:
            is_reached = above + upper >= target
            low = tl.where(is_reached, middle, low)
            high = tl.where(is_reached, high, middle)
            above = tl.where(is_reached, above, above + upper)

    found, ties = low, count  # more tokens than fit remain only if all have the same logit
    if count <= CANDIDATES:
        tl.debug_barrier()  # the candidates were stored by other threads
        index = tl.arange(0, CANDIDATES)
        logits = tl.load(candidates_ptr + index, mask=index < count, other=float("-inf"))
        weights = tl.where(index < count, _weight(logits, maximum, scale, by_mass), 0)
        found = _last_to_reach(logits, weights, low, high, target - above)
        above += tl.sum(tl.where(logits > found, weights, 0), 0)
        ties = tl.sum((logits == found).to(tl.int32), 0)
    last_id = tl.where(found > border, VOCAB, last_id)
    weight = tl.maximum(_weight(found, maximum, scale, by_mass), 1)
    num_kept = (target - above + weight - 1) // weight
    if num_kept < ties:
        last_id = _nth_tie(logits_ptr, found, num_kept.to(tl.int32), VOCAB, BLOCK * TILE_BLOCKS)
    return found, last_id


@triton.jit
def _lower_bound(
    maxima: tl.tensor,
    masses: tl.tensor,
    maximum: tl.tensor,
    scale: tl.tensor,
    by_mass: tl.tensor,
    low: tl.tensor,
    target: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """A logit not below `low`, and below the border: what lies above it reaches the target surely.

    By count, each block whose maximum is no lower holds one such token at least. By mass, a block
    holds below the logit at most what BLOCK tokens of that logit weigh, and the rest above it.
    """
    high = maximum
    for _ in range(BOUND_STEPS):
        middle = low + (high - low) * 0.5
        below = BLOCK * _weight(middle, maximum, scale, True)
        by_block = tl.where(by_mass, tl.maximum(masses - below, 0), UNIT)
        by_block = tl.where(by_mass | (maxima >= middle), by_block, 0)
        surely = tl.sum(by_block, 0)
        low = tl.where(surely >= target, middle, low)
        high = tl.where(surely >= target, high, middle)
    return low


@triton.jit
def _scan(
    candidates_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    maximum: tl.tensor,
    scale: tl.tensor,
    by_mass: tl.tensor,
    border: tl.tensor,
    last_id: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    middle: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Store the kept logits in [low, high), as many as fit; return how many there are, and the
    weight of those from `middle` (not below `low`) on."""
    count = tl.full([], 0, tl.int32)
    upper = tl.full([], 0, tl.int64)
    for tile in range((NUM_BLOCKS + TILE_BLOCKS - 1) // TILE_BLOCKS):
        block = tile * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
        maxima = tl.load(maxima_ptr + block, mask=block < NUM_BLOCKS, other=float("-inf"))
        token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        reached = (maxima >= low)[:, None] & (token < VOCAB)
        logits = tl.load(logits_ptr + token, mask=reached, other=float("-inf")).to(tl.float32)
        inside = _is_kept(logits, token, border, last_id) & (logits >= low) & (logits < high)
        ones = inside.to(tl.int32)
        in_block = tl.sum(ones, 1)
        start = count + tl.cumsum(in_block, 0) - in_block
        place = start[:, None] + tl.cumsum(ones, 1) - ones
        tl.store(candidates_ptr + place, logits, mask=inside & (place < CANDIDATES))
        weights = tl.where(by_mass, tl.exp2((logits - maximum) * scale), 1.0)
        weights = tl.where(inside & (logits >= middle), weights, 0.0)
        upper += (tl.sum(tl.sum(weights, 1), 0) * UNIT).to(tl.int64)
        count += tl.sum(in_block, 0)
    return count, upper


@triton.jit
def _last_to_reach(
    logits: tl.tensor, weights: tl.tensor, low: tl.tensor, high: tl.tensor, target: tl.tensor
) -> tl.tensor:
    """The greatest number in [low, high) with logits from it on that weigh `target`, or `low`."""
    low_key, high_key = _key(low).to(tl.int64), _key(high).to(tl.int64)
    while high_key - low_key > 1:
        middle = (low_key + high_key) >> 1
        weight = tl.sum(tl.where(logits >= _from_key(middle.to(tl.int32)), weights, 0), 0)
        low_key = tl.where(weight >= target, middle, low_key)
        high_key = tl.where(weight >= target, high_key, middle)
    return _from_key(low_key.to(tl.int32))


@triton.jit
def _nth_tie(
    logits_ptr: tl.tensor,
    logit: tl.tensor,
    n: tl.tensor,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The id of the n-th token with this logit, counted from 1; there are that many."""
    start = tl.full([], 0, tl.int32)
    seen = tl.full([], 0, tl.int32)
    found = tl.full([], VOCAB, tl.int32)
    while seen < n:
        token = start + tl.arange(0, TILE)
        logits = tl.load(logits_ptr + token, mask=token < VOCAB, other=float("-inf"))
        ties = (logits.to(tl.float32) == logit).to(tl.int32)
        is_nth = (ties > 0) & (seen + tl.cumsum(ties, 0) == n)
        found = tl.minimum(found, tl.min(tl.where(is_nth, token, VOCAB), 0))
        seen += tl.sum(ties, 0)
        start += TILE
    return found


@triton.jit
def _min_p_border(maximum: tl.tensor, temperature: tl.tensor, log_min_p: tl.tensor) -> tl.tensor:
    """The lowest logit that passes `logit / T >= maximum / T + log(min_p)` in float32."""
    least = tl.div_rn(maximum, temperature) + log_min_p
    near = _from_key(_key(least * temperature) + tl.arange(0, 64) - 32)
    passes = tl.div_rn(near, temperature) >= least
    return tl.min(tl.where(passes, near, maximum), 0)


@triton.jit
def _weight(
    logits: tl.tensor, maximum: tl.tensor, scale: tl.tensor, by_mass: tl.tensor
) -> tl.tensor:
    """Each token's mass, or 1, as integers."""
    weights = tl.where(by_mass, tl.exp2((logits - maximum) * scale), 1.0)
    return (weights * UNIT).to(tl.int64)


@triton.jit
def _is_kept(
    logits: tl.tensor, token: tl.tensor, border: tl.tensor, last_id: tl.tensor
) -> tl.tensor:
    return (logits > border) | ((logits == border) & (token <= last_id))


@triton.jit
def _key(value: tl.tensor) -> tl.tensor:
    """An int32 in the order of the float32."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _from_key(key: tl.tensor) -> tl.tensor:
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _uniform(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """`sampler.uniforms` of one (seed, position), both uint64: float64 in [0, 1)."""
    bits = _mix(_mix(seed + GAMMA) + (position + 1) * GAMMA)
    return (bits >> 16).to(tl.float64) * 2.0**-48


@triton.jit
def _mix(bits: tl.tensor) -> tl.tensor:
    bits = (bits ^ (bits >> 30)) * MIX_1
    bits = (bits ^ (bits >> 27)) * MIX_2
    return bits ^ (bits >> 31)
