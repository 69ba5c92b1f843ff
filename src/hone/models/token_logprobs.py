"""Log-probabilities of tokens, with the same bits as those that sampling reports.

The vocabulary is cut into blocks of `BLOCK_TOKENS`. One kernel reads the logits and stores the
maximum and the sum of exp((logit - maximum) / T) of every block; another merges them row by row.
Masses are added as integers, in units of 2**-42 of the most probable token's: their sums depend
neither on order nor on layout. Sums inside a block are float32 and depend only on V, the dtype and
the alignment of rows. So a row has the same bits in any batch, whether an engine samples from it
(`hone.engine.sampling_kernels` continues from the same blocks) or a trainer scores it.

Letters: N rows, V vocabulary. The tensor that the kernels call `scale` is log2(e) / T. This module
imports triton; import it only where it is used.
"""
# A launch passes plain numbers for constexpr parameters and takes `num_warps`, which the types of
# triton do not know; kernels take their pointers by position. Operators of `tl.tensor` are untyped.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false
# ruff: noqa: PLR0917

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Rows", "block_sums", "column", "token_logprobs"]

BLOCK_TOKENS = 256
TILE_BLOCKS = 32
"""Number of blocks that one program reads at once."""
TILE_WARPS = 8
ROW_WARPS = 4
MAX_VOCAB_SIZE = 1 << 20
"""Largest vocabulary for which a row's mass in units of 2**-42 fits into an int64."""

LOG2_E = tl.constexpr(1.4426950408889634)
UNIT = tl.constexpr(1 << 42)


def token_logprobs(logits_NV: Tensor, token_ids_N: Tensor, temperatures_N: Tensor) -> Tensor:
    """Log-probabilities [N] float32 of given tokens (int64) under softmax(logits / T).

    The bits are those that `sample` reports for the same row of logits without filters, whatever
    the number of rows; a greedy row has temperature 1 there. Logits as in `sample`, temperatures
    [N] float32.
    """
    rows = Rows.of(logits_NV, temperatures_N)
    maxima, sums = block_sums(rows)
    logprobs_N = torch.empty_like(maxima[:, 0])
    _score_kernel[(rows.number,)](
        logprobs_N,
        maxima,
        sums,
        *column(token_ids_N),
        *rows.pointers,
        **rows.shape,
        num_warps=ROW_WARPS,
    )
    return logprobs_N


class Rows(NamedTuple):
    """Logits with their temperatures, as the kernels take them."""

    number: int
    num_tiles: int
    pointers: tuple[Tensor | int, ...]
    shape: dict[str, int]

    @classmethod
    def of(cls, logits: Tensor, temperatures: Tensor) -> Rows:
        number, vocab_size = logits.shape
        if vocab_size > MAX_VOCAB_SIZE:
            raise ValueError(
                f"vocabulary of {vocab_size} tokens: fused sampling takes at most {MAX_VOCAB_SIZE}"
            )
        assert vocab_size == 1 or logits.stride(1) == 1, f"{logits.shape=} {logits.stride()=}"
        if logits.data_ptr() % 16:
            # The order of additions must not depend on the alignment of rows.
            logits = logits.clone()
        stride = logits.stride(0) if number > 1 else vocab_size
        num_blocks = triton.cdiv(vocab_size, BLOCK_TOKENS)
        return cls(
            number=number,
            num_tiles=triton.cdiv(num_blocks, TILE_BLOCKS),
            pointers=(logits, stride, *column(temperatures)),
            shape={
                "VOCAB": vocab_size,
                "BLOCK": BLOCK_TOKENS,
                "NUM_BLOCKS": num_blocks,
                "ALL_BLOCKS": triton.next_power_of_2(num_blocks),
                "TILE_BLOCKS": TILE_BLOCKS,
            },
        )


def column(values: Tensor) -> tuple[Tensor, int]:
    """One number per row, [B] or [B, 1], and the stride of rows."""
    return values, values.stride(0)


def block_sums(rows: Rows) -> Tensor:
    """The maximum of each block and its sum of exp((logit - maximum) / T), [2, B, K] float32."""
    logits = rows.pointers[0]
    assert isinstance(logits, Tensor)
    num_blocks = rows.shape["NUM_BLOCKS"]
    sums = logits.new_empty((2, rows.number, num_blocks), dtype=torch.float32)
    _block_sums_kernel[(rows.number * rows.num_tiles,)](
        *sums, *rows.pointers, **rows.shape, num_warps=TILE_WARPS
    )
    return sums


@triton.jit
def _block_sums_kernel(
    maxima_ptr: tl.tensor,
    sums_ptr: tl.tensor,
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
    row, block = tile_of(NUM_BLOCKS, TILE_BLOCKS)
    token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = token < VOCAB
    logits = tl.load(logits_ptr + row * row_stride + token, mask=inside, other=float("-inf"))
    scale = LOG2_E / tl.load(temperatures_ptr + row * temperature_stride)
    logits = logits.to(tl.float32)
    maximum = tl.max(logits, 1)
    finite = tl.where(maximum == float("-inf"), 0.0, maximum)  # every token may be at -inf
    mass = tl.sum(tl.exp2((logits - finite[:, None]) * scale), 1)
    place = row * NUM_BLOCKS + block
    tl.store(maxima_ptr + place, maximum, mask=block < NUM_BLOCKS)
    tl.store(sums_ptr + place, mass, mask=block < NUM_BLOCKS)


@triton.jit
def _score_kernel(
    logprobs_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    token_id_stride: tl.tensor,
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
    token_id = tl.load(token_ids_ptr + row * token_id_stride)
    logit = tl.load(logits_ptr + row * row_stride + token_id).to(tl.float32)
    _, masses, maximum = block_masses(
        maxima_ptr, sums_ptr, row, LOG2_E / temperature, NUM_BLOCKS, ALL_BLOCKS
    )
    tl.store(logprobs_ptr + row, logprob_of(logit, maximum, temperature, tl.sum(masses, 0)))


@triton.jit
def tile_of(NUM_BLOCKS: tl.constexpr, TILE_BLOCKS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The row and the blocks of this program; programs of one row are neighbours."""
    num_tiles = (NUM_BLOCKS + TILE_BLOCKS - 1) // TILE_BLOCKS
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    return row, (tl.program_id(0) % num_tiles) * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)


@triton.jit
def block_masses(
    maxima_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    row: tl.tensor,
    scale: tl.tensor,
    NUM_BLOCKS: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Maxima of a row's blocks, their masses as integers, and the row's maximum.

    All masses are 0 where the row is not all numbers.
    """
    index = tl.arange(0, ALL_BLOCKS)
    place, inside = row * NUM_BLOCKS + index, index < NUM_BLOCKS
    maxima = tl.load(maxima_ptr + place, mask=inside, other=float("-inf"))
    sums = tl.load(sums_ptr + place, mask=inside, other=0.0)
    maximum = tl.max(maxima, 0)
    weights = sums * tl.exp2((maxima - maximum) * scale)
    total = tl.sum(weights, 0)
    weights = tl.where(total == total, weights, 0.0)  # noqa: PLR0124
    return maxima, (weights * UNIT).to(tl.int64), maximum


@triton.jit
def logprob_of(
    logit: tl.tensor, maximum: tl.tensor, temperature: tl.tensor, total: tl.tensor
) -> tl.tensor:
    """log(exp((logit - maximum) / T) / total) by float64; NaN where there is no mass."""
    distance = (logit - maximum).to(tl.float64) / temperature.to(tl.float64)
    mass = tl.maximum(total, 1).to(tl.float64) / UNIT
    return tl.where(total > 0, (distance - tl.log(mass)).to(tl.float32), float("nan"))
