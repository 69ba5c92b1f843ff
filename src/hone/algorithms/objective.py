"""The whole objective of a micro-batch: loss, correction, KL and entropy, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hone.algorithms.algorithm import Loss, Outputs
from hone.algorithms.corrections import CORRECTIONS, importance_ratio
from hone.algorithms.kl import KL_ESTIMATORS, k1, k3
from hone.algorithms.losses import LOSSES, LossInputs
from hone.algorithms.rows import row_weights
from hone.algorithms.settings import AlgorithmConfig, Output
from hone.observe.metrics import Distribution, Mean, Metrics
from hone.types import LossExtent, MicroBatch, Row

__all__ = ["PolicyObjective", "PolicyTerms", "policy_objective"]


class PolicyObjective:
    """The objective of a policy. Implements `Objective`."""

    outputs: frozenset[Output] = frozenset({"logprobs", "entropy"})
    outputs_before: frozenset[Output] = frozenset({"logprobs"})
    per: LossExtent = "trained"

    def __init__(self, cfg: AlgorithmConfig, *, max_completion_tokens: int) -> None:
        """`max_completion_tokens` is the divisor of the aggregation `constant`."""
        self.cfg = cfg
        needs_reference = cfg.kl.coef > 0 and cfg.kl.placement == "loss"
        reference = {"logprobs/reference"} if needs_reference else set[str]()
        self.columns = frozenset({"advantages"} | reference)
        self._max_completion_tokens = max_completion_tokens

    def weights(self, rows: Sequence[Row]) -> list[float]:
        return row_weights(self.cfg.aggregation, rows, self._max_completion_tokens)

    def __call__(self, outputs: Outputs, batch: MicroBatch) -> Loss:
        terms = policy_objective(outputs["logprobs"], outputs["entropy"], batch, self.cfg)
        metrics: Metrics = {key: Mean.of(value) for key, value in terms.token_metrics.items()}
        log_ratio = terms.log_ratio_engine
        if log_ratio is not None:
            metrics["off_policy/ratio"] = Distribution.of(importance_ratio(log_ratio))
            # Not indexed by the mask: the host would wait for the device to count the tokens left.
            fresh = _is_fresh(batch)
            mismatch = k3(torch.zeros_like(log_ratio), log_ratio).where(fresh, 0.0)
            metrics["off_policy/mismatch_kl"] = Mean(mismatch.double().sum(), fresh.sum())
        advantages = batch.column("advantages")
        for sign, has_sign in (("positive", advantages > 0), ("negative", advantages < 0)):
            num_masked = (terms.masked & has_sign).sum()
            metrics[f"policy/masked_share/{sign}"] = Mean(num_masked, has_sign.sum())
        return Loss(terms.values, metrics)


def _is_fresh(batch: MicroBatch) -> Tensor:
    """Whether each token was sampled by the weights before this update, [N] bool.

    Only such tokens show how well engine and trainer agree; at others the updates since they were
    sampled count too.
    """
    if "staleness" not in batch.columns:
        return torch.ones_like(batch.labels, dtype=torch.bool)
    return batch.column("staleness") == 0


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """The objective of each token before weighting, and what is reported about it."""

    values: Tensor  # [N], carries the gradient
    token_metrics: dict[str, Tensor]
    """Detached, [N] each; the mean over trained tokens is the metric."""
    log_ratio_engine: Tensor | None
    """[N] old trainer log-probs less the engine's; None where the engine gave none."""
    masked: Tensor
    """[N] bool, tokens without a policy gradient: clipped, or corrected by a factor of 0."""


def policy_objective(
    logprobs: Tensor, entropy: Tensor, batch: MicroBatch, cfg: AlgorithmConfig
) -> PolicyTerms:
    """Per-token objective `correction * loss + kl.coef * KL - entropy_coef * entropy`.

    `logprobs` and `entropy` are [N] float32 of the policy being trained. Without the column
    `logprobs/policy` the policy has not changed since the rollout, and its own detached values are
    used as the old ones: the ratio is 1 and the gradient is that of REINFORCE.
    """
    current = logprobs.detach()
    old = batch.columns.get("logprobs/policy", current)
    engine, reference = (batch.columns.get(f"logprobs/{role}") for role in ("engine", "reference"))
    terms = LOSSES[cfg.loss](
        LossInputs(
            logprobs=logprobs,
            old_logprobs=old,
            advantages=batch.column("advantages"),
            sequence_index=batch.sequence_index,
            num_sequences=batch.num_sequences,
        ),
        cfg,
    )
    values = terms.values
    metrics = {
        "policy/clip_fraction": terms.clipped.to(current.dtype),
        "policy/approx_kl": k3(old, current),
        "policy/ratio/mean": importance_ratio(current - old),
    }

    log_ratio_engine, masked = None, terms.clipped
    if engine is not None:
        log_ratio_engine = old - engine
        metrics["off_policy/kl"] = k3(engine, old)
        factors = CORRECTIONS[cfg.correction.kind](
            log_ratio_engine,
            batch.sequence_index,
            batch.num_sequences,
            cfg.correction.low,
            cfg.correction.high,
        )
        if cfg.correction.kind != "none":
            values, masked = values * factors, masked | (factors == 0)
            metrics["off_policy/correction"] = factors

    if reference is not None:
        metrics["policy/ref_kl"] = k3(current, reference)
        metrics["policy/ref_kl_k1"] = k1(current, reference)
        if cfg.kl.placement == "loss":
            values = values + cfg.kl.coef * KL_ESTIMATORS[cfg.kl.estimator](logprobs, reference)

    metrics["policy/entropy"] = entropy.detach()
    if cfg.entropy_coef:
        values = values - cfg.entropy_coef * entropy
    return PolicyTerms(values, metrics, log_ratio_engine, masked)
