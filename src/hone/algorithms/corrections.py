"""Importance corrections for tokens that another policy sampled.

The engine's policy and the trainer's rarely agree to the last bit, and in asynchronous training the
engine is a few versions behind. With `w_t = exp(trainer_logprob_t - engine_logprob_t)` a correction
gives each token a factor on its loss; no gradient flows through it. It repairs a small gap and
must not hide a broken sync: the parity gate (`hone.weights.parity`) comes first.

The configuration takes the values of `algorithm.correction.kind` from this file before torch is
loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias

from hone.algorithms.kl import MAX_LOG_RATIO
from hone.algorithms.sequences import sequence_mean_to_tokens

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CORRECTIONS", "CorrectionKind", "importance_ratio"]

CorrectionKind = Literal["none", "tis", "icepop", "sequence_mask"]

Correction: TypeAlias = "Callable[[Tensor, Tensor, int, float, float], Tensor]"
"""(log_ratio [N], sequence_index [N], num_sequences, low, high) -> factors [N]"""


def importance_ratio(log_ratio: Tensor) -> Tensor:
    """`exp(log_ratio)`, clamped against overflow."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def none(
    log_ratio: Tensor, sequence_index: Tensor, num_sequences: int, low: float, high: float
) -> Tensor:
    """No correction."""
    del sequence_index, num_sequences, low, high
    return log_ratio.new_ones(log_ratio.shape)


def tis(
    log_ratio: Tensor, sequence_index: Tensor, num_sequences: int, low: float, high: float
) -> Tensor:
    """Truncated importance sampling, `min(w, high)` (Yao et al., "Your efficient RL framework
    secretly brings you off-policy RL training", 2025)."""
    del sequence_index, num_sequences, low
    return importance_ratio(log_ratio).clamp(max=high)


def icepop(
    log_ratio: Tensor, sequence_index: Tensor, num_sequences: int, low: float, high: float
) -> Tensor:
    """IcePop: `w` where it lies in [low, high], else 0. Outliers are dropped, not truncated
    (Ling team, "Small leak can sink a great ship", 2025)."""
    del sequence_index, num_sequences
    ratio = importance_ratio(log_ratio)
    return ratio.where((ratio >= low) & (ratio <= high), 0.0)


def sequence_mask(
    log_ratio: Tensor, sequence_index: Tensor, num_sequences: int, low: float, high: float
) -> Tensor:
    """1 for sequences whose geometric mean ratio lies in [low, high], 0 for the others. OpenRLHF
    (level `seq`) instead keeps each token's own ratio in the accepted sequences."""
    mean = sequence_mean_to_tokens(log_ratio, sequence_index, num_sequences)
    ratio = importance_ratio(mean)
    return ((ratio >= low) & (ratio <= high)).to(log_ratio.dtype)


CORRECTIONS: Mapping[CorrectionKind, Correction] = {
    "none": none,
    "tis": tis,
    "icepop": icepop,
    "sequence_mask": sequence_mask,
}
