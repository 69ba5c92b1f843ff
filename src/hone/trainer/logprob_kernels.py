"""Triton kernels for a chunk of logits in `hone.trainer.logprobs`, each one pass over the logits.

The statistics read the logits once; the gradient reads them once and writes its own format. So,
apart from the matrix products, a chunk's logits are read once in forward and once in backward.

This module imports triton; `hone.trainer.logprobs` imports it only where it is used.
"""
# A launch passes plain numbers for constexpr parameters and takes `num_warps`, which triton's type
# hints do not know; kernels take their pointers by position, some of which may be None.
# pyright: reportArgumentType=false, reportCallIssue=false, reportUnnecessaryComparison=false
# ruff: noqa: PLR0917

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["logits_gradient", "part_statistics"]

STATISTICS_BLOCK, STATISTICS_WARPS = 2048, 4
"""One program takes a row, a block at a time; each lane keeps its own maximum and sums."""
GRADIENT_BLOCK, GRADIENT_WARPS = 2048, 4


def part_statistics(
    logits_CV: Tensor,
    labels_C: Tensor,
    *,
    temperature: float,
    softcap: float | None,
    with_entropy: bool,
) -> Tensor:
    """Triton version of `hone.trainer.logprobs.part_statistics` for float32 logits with contiguous
    rows."""
    num_rows, num_words = logits_CV.shape
    statistics_SC = logits_CV.new_empty((4 if with_entropy else 3, num_rows))
    if num_rows:
        _statistics_kernel[(num_rows,)](
            statistics_SC,
            logits_CV,
            logits_CV.stride(0),
            labels_C,
            num_rows,
            num_words,
            temperature,
            softcap or 0.0,
            HAS_SOFTCAP=softcap is not None,
            WITH_ENTROPY=with_entropy,
            BLOCK=STATISTICS_BLOCK,
            num_warps=STATISTICS_WARPS,
        )
    return statistics_SC


def logits_gradient(
    logits_CV: Tensor,
    labels_C: Tensor,
    *,
    normaliser_C: Tensor,
    entropy_C: Tensor | None,
    grad_logprobs_C: Tensor,
    grad_entropy_C: Tensor | None,
    temperature: float,
    softcap: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """Triton version of `hone.trainer.logprobs.logits_gradient` for float32 logits with contiguous
    rows."""
    num_rows, num_words = logits_CV.shape
    gradient_CV = torch.empty_like(logits_CV, dtype=dtype)
    with_entropy = entropy_C is not None and grad_entropy_C is not None
    if num_rows:
        _gradient_kernel[(num_rows, triton.cdiv(num_words, GRADIENT_BLOCK))](
            gradient_CV,
            logits_CV,
            logits_CV.stride(0),
            labels_C,
            normaliser_C,
            entropy_C if with_entropy else None,
            grad_logprobs_C.contiguous(),
            grad_entropy_C.contiguous() if grad_entropy_C is not None else None,
            num_words,
            temperature,
            softcap or 0.0,
            HAS_SOFTCAP=softcap is not None,
            WITH_ENTROPY=with_entropy,
            BLOCK=GRADIENT_BLOCK,
            num_warps=GRADIENT_WARPS,
        )
    return gradient_CV


@triton.jit
def _cap(x: tl.tensor, softcap: tl.tensor) -> tl.tensor:
    """softcap * tanh(x / softcap)"""
    return softcap * (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0)


# A chunk begins anywhere among the labels and gradients of all tokens: whether these lie at a
# multiple of 16 bytes differs from step to step, and kernels would be compiled for both.
_OF_TOKENS = (
    "labels_ptr",
    "normaliser_ptr",
    "entropy_ptr",
    "grad_logprobs_ptr",
    "grad_entropy_ptr",
)


@triton.jit(
    do_not_specialize=["num_rows", "temperature", "softcap"],
    do_not_specialize_on_alignment=["labels_ptr"],
)
def _statistics_kernel(
    statistics_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    row_stride: tl.tensor,
    labels_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_words: tl.tensor,
    temperature: tl.tensor,
    softcap: tl.tensor,
    HAS_SOFTCAP: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    lane = tl.arange(0, BLOCK)
    maximum = tl.full([BLOCK], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_words, BLOCK):
        word = start + lane
        x = tl.load(row_ptr + word, mask=word < num_words, other=float("-inf"))
        if HAS_SOFTCAP:
            x = tl.where(word < num_words, _cap(x, softcap), float("-inf"))
        x = x / temperature
        # One exponential is enough: that of the distance between the new value and the maximum so
        # far.
        rises = x > maximum
        step = tl.where(x == float("-inf"), float("-inf"), x - maximum)
        shrink = tl.exp(-tl.abs(step))
        if WITH_ENTROPY:
            # A lane without earlier values has nothing to rescale.
            old = tl.where(maximum == float("-inf"), 0.0, shrink * (moment - mass * step))
            new = moment + tl.where(shrink > 0.0, shrink * step, 0.0)
            moment = tl.where(rises, old, new)
        mass = tl.where(rises, mass * shrink + 1.0, mass + shrink)
        maximum = tl.where(rises, x, maximum)
    highest = tl.max(maximum, 0)
    distance = tl.where(maximum == float("-inf"), float("-inf"), maximum - highest)
    weight = tl.exp(distance)
    label = tl.load(labels_ptr + row)
    is_own = (label >= 0) & (label < num_words)
    label_logit = tl.load(row_ptr + label, mask=is_own, other=0.0)
    if HAS_SOFTCAP:
        label_logit = _cap(label_logit, softcap)
    place_ptr = statistics_ptr + row
    tl.store(place_ptr, highest)
    tl.store(place_ptr + num_rows, tl.sum(mass * weight, 0))
    tl.store(place_ptr + 2 * num_rows, label_logit / temperature)
    if WITH_ENTROPY:
        shift = tl.where(weight > 0.0, mass * distance, 0.0)
        tl.store(place_ptr + 3 * num_rows, tl.sum(weight * (moment + shift), 0))


@triton.jit(do_not_specialize=["temperature", "softcap"], do_not_specialize_on_alignment=_OF_TOKENS)
def _gradient_kernel(
    gradient_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    row_stride: tl.tensor,
    labels_ptr: tl.tensor,
    normaliser_ptr: tl.tensor,
    entropy_ptr: tl.tensor,
    grad_logprobs_ptr: tl.tensor,
    grad_entropy_ptr: tl.tensor,
    num_words: tl.tensor,
    temperature: tl.tensor,
    softcap: tl.tensor,
    HAS_SOFTCAP: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < num_words
    x = tl.load(logits_ptr + row * row_stride + word, mask=inside, other=0.0)
    if HAS_SOFTCAP:
        x = _cap(x, softcap)
    log_p = x / temperature - tl.load(normaliser_ptr + row)
    p = tl.exp(log_p)
    factor = tl.load(grad_logprobs_ptr + row)
    gradient = tl.where(word == tl.load(labels_ptr + row), factor, 0.0) - p * factor
    if WITH_ENTROPY:
        slope = tl.load(grad_entropy_ptr + row)
        surprise = log_p + tl.load(entropy_ptr + row)
        gradient -= slope * p * surprise
    gradient /= temperature
    if HAS_SOFTCAP:
        gradient *= 1.0 - (x / softcap) * (x / softcap)
    tl.store(gradient_ptr + row * num_words + word, gradient, mask=inside)
