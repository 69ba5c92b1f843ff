"""The launch gate: engine and trainer must agree on log-probabilities.

Corrections and clipping hide a broken sync, a wrong temperature or a shifted label, and the curves
still look plausible for a while. So the first step of every launch scores the engine's samples with
the trainer, before anything is trained on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from hone.algorithms.corrections import importance_ratio
from hone.algorithms.kl import k3
from hone.errors import UserError
from hone.observe.metrics import Last, Metrics
from hone.types import Row, Trainer

__all__ = [
    "MAX_OUTSIDE",
    "MAX_ROWS",
    "ParityGate",
    "ParityReport",
    "check_parity",
    "measure_parity",
]

MAX_ROWS = 256
"""Most samples that the gate scores."""

MAX_OUTSIDE = 0.08
"""Largest share of tokens whose ratio lies outside [0.9, 1.1]."""
_DEFAULT_MAX_KL = {"float32": 1e-6, "bfloat16": 2e-3}


@dataclass(frozen=True, slots=True)
class ParityReport:
    """Agreement of two sets of log-probabilities over the same tokens."""

    num_tokens: int
    kl: float
    """Mean k3 divergence of the trainer from the engine."""
    share_outside: float
    """Share of tokens whose ratio trainer / engine lies outside [0.9, 1.1]."""
    max_difference: float
    """Largest absolute difference of a token's log-probabilities, in nats."""
    drift: float
    """Mean absolute difference in the last quarter of the sequences, divided by that in the first.
    A large value means that the gap grows with the position (RoPE, KV cache, chunked prefill)."""


@dataclass(slots=True)
class ParityGate:
    """A check that runs once a launch, on the first rows with tokens to compare."""

    limit: Literal["auto", "off"] | float
    """Value of `trainer.parity`."""
    dtype: Literal["float32", "bfloat16"]
    exact: bool = False
    """Value of `model.exact`: any difference at all is an error."""
    has_passed: bool = False

    def check(self, rows: Sequence[Row], trainer: Trainer) -> Metrics:
        """The report as metrics; empty once the gate has passed. Collective. Raises the errors of
        `check_parity`."""
        if self.has_passed:
            return {}
        report = check_parity(rows, trainer, self.limit, dtype=self.dtype, exact=self.exact)
        if report is None:
            return {}
        self.has_passed = True
        return {
            "off_policy/parity/kl": Last(report.kl),
            "off_policy/parity/share_outside": Last(report.share_outside),
            "off_policy/parity/max_difference": Last(report.max_difference),
        }


def measure_parity(rows: Sequence[Row], trainer: Trainer) -> ParityReport:
    """Score the first rows with the trainer and compare with the engine's log-probabilities.

    Only tokens sampled by the current weights are compared: a carried-over sample may have older
    ones.
    """
    chosen = _chosen([row for row in rows if _num_fresh(row)])
    differences: list[torch.Tensor] = []
    for row, logprobs in zip(chosen, trainer.logprobs(chosen), strict=True):
        difference = (logprobs - row.column("logprobs/engine")).double()
        differences.append(difference[row.column("staleness") == 0])
    difference = torch.cat(differences)
    ratio = importance_ratio(difference)
    head = torch.cat([d[: max(len(d) // 4, 1)] for d in differences]).abs().mean()
    tail = torch.cat([d[-max(len(d) // 4, 1) :] for d in differences]).abs().mean()
    return ParityReport(
        num_tokens=len(difference),
        kl=float(k3(torch.zeros_like(difference), difference).mean()),
        share_outside=float(((ratio < 0.9) | (ratio > 1.1)).double().mean()),
        max_difference=float(difference.abs().max()),
        drift=float(tail / head) if head > 0 else 1.0,
    )


def _chosen(rows: Sequence[Row]) -> list[Row]:
    """The first `MAX_ROWS` rows; in place of the last, the first row with an image if no other of
    them has one, or without an image if all of them have one."""
    chosen = list(rows[:MAX_ROWS])
    have_images = {bool(row.model_input) for row in chosen}
    other = next((r for r in rows[MAX_ROWS:] if bool(r.model_input) not in have_images), None)
    return chosen if other is None else [*chosen[:-1], other]


def _num_fresh(row: Row) -> int:
    return int((row.column("staleness") == 0).sum())


def check_parity(
    rows: Sequence[Row],
    trainer: Trainer,
    limit: Literal["auto", "off"] | float,
    *,
    dtype: Literal["float32", "bfloat16"],
    exact: bool = False,
) -> ParityReport | None:
    """The report of a passed check, or None when it is switched off or has no tokens to compare.

    Raises UserError when `trainer.parity` or `MAX_OUTSIDE` is exceeded, and with `exact` when any
    token differs at all.
    """
    if limit == "off" or not any(map(_num_fresh, rows)):
        return None
    report = measure_parity(rows, trainer)
    if exact and report.max_difference != 0:
        raise UserError(
            f"model.exact is on, but over {report.num_tokens} tokens engine and trainer differ by "
            f"up to {report.max_difference:.3g} nats (mean k3 divergence {report.kl:.2e}) before "
            "the first update: a kernel depends on the batch on this device, or weights differ. "
            "Set model.exact=false to go on without the guarantee."
        )
    max_kl = _DEFAULT_MAX_KL[dtype] if isinstance(limit, str) else limit
    if report.kl <= max_kl and report.share_outside <= MAX_OUTSIDE:
        return report
    raise UserError(
        f"engine and trainer disagree before the first update: over {report.num_tokens} tokens the "
        f"mean k3 divergence is {report.kl:.2e} (trainer.parity allows {max_kl:.0e}), "
        f"{report.share_outside:.1%} of the ratios lie outside [0.9, 1.1] "
        f"(allowed: {MAX_OUTSIDE:.0%}), the largest difference is "
        f"{report.max_difference:.3f} nats, and the gap in the last quarter of the sequences is "
        f"{report.drift:.1f} times that in the first. A gap from the start points to the sampling "
        "distribution or the weights, a growing one to positions or the KV cache. Training on "
        "such samples is not on-policy; raise trainer.parity only if you know the cause."
    )
