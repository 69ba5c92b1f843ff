"""The whole objective of a micro-batch: loss, correction, KL and entropy, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hone.algorithms.aggregation import AGGREGATIONS
from hone.algorithms.algorithm import Output, TokenLoss, TokenOutputs
from hone.algorithms.corrections import CORRECTIONS, importance_ratio
from hone.algorithms.kl import KL_ESTIMATORS, k1, k3
from hone.algorithms.losses import LOSSES
from hone.algorithms.policy_loss import LossInputs
from hone.config.algorithm import AlgorithmConfig
from hone.observe.metrics import Distribution, Mean, Metrics
from hone.types import MicroBatch, Trajectory

__all__ = ["PolicyObjective", "PolicyTerms", "policy_objective"]


class PolicyObjective:
    """What a policy is trained on. Implements `Objective`."""

    outputs: frozenset[Output] = frozenset({"logprobs", "entropy"})

    def __init__(self, cfg: AlgorithmConfig, *, max_completion_tokens: int) -> None:
        """`max_completion_tokens` is what the aggregation `constant` divides by."""
        self.cfg = cfg
        needs_reference = cfg.kl.coef > 0 and cfg.kl.placement == "loss"
        self.columns = frozenset({"advantages"} | ({"ref_logprobs"} if needs_reference else set()))
        self._max_completion_tokens = max_completion_tokens

    def weights(self, rows: Sequence[Trajectory]) -> list[float]:
        num_trained = [row.num_trained for row in rows]
        return AGGREGATIONS[self.cfg.aggregation](num_trained, self._max_completion_tokens)

    def __call__(self, outputs: TokenOutputs, batch: MicroBatch) -> TokenLoss:
        terms = policy_objective(outputs.logprobs, outputs.entropy, batch, self.cfg)
        metrics: Metrics = {key: Mean.of(value) for key, value in terms.token_metrics.items()}
        log_ratio = terms.log_ratio_engine
        if log_ratio is not None:
            metrics["off_policy/ratio"] = Distribution.of(importance_ratio(log_ratio))
            # Not indexed by the mask: how many are left would be waited for.
            fresh = _is_fresh(batch)
            mismatch = k3(torch.zeros_like(log_ratio), log_ratio).where(fresh, 0.0)
            metrics["off_policy/mismatch_kl"] = Mean(mismatch.double().sum(), fresh.sum())
        return TokenLoss(terms.values, metrics)


def _is_fresh(batch: MicroBatch) -> Tensor:
    """Tokens sampled by the very weights that the rollout is trained from, [N] bool.

    Only these tell how well engine and trainer agree: others also differ by the updates since.
    """
    if batch.staleness is None:
        return torch.ones_like(batch.labels, dtype=torch.bool)
    return batch.staleness == 0


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """Values to be multiplied with the token weights and summed, and what to report of them."""

    values: Tensor  # [N], carries the gradient
    token_metrics: dict[str, Tensor]
    """Detached, [N] each; the mean over trained tokens is the metric."""
    log_ratio_engine: Tensor | None
    """[N] old trainer log-probs less the engine's; None where the engine gave none."""


def policy_objective(
    logprobs: Tensor, entropy: Tensor | None, batch: MicroBatch, cfg: AlgorithmConfig
) -> PolicyTerms:
    """Per-token objective `correction * loss + kl.coef * KL - entropy_coef * entropy`.

    `logprobs` and `entropy` are [N] float32 of the policy being trained. Where the batch has no
    `old_logprobs`, the policy has not moved since the rollout and its own detached values stand
    in: the ratio is 1 and the gradient is that of REINFORCE.
    """
    assert batch.advantages is not None, "a policy batch needs advantages"
    current = logprobs.detach()
    old = current if batch.old_logprobs is None else batch.old_logprobs
    terms = LOSSES[cfg.loss](
        LossInputs(
            logprobs=logprobs,
            old_logprobs=old,
            advantages=batch.advantages,
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

    log_ratio_engine = None
    if batch.rollout_logprobs is not None:
        log_ratio_engine = old - batch.rollout_logprobs
        metrics["off_policy/kl"] = k3(batch.rollout_logprobs, old)
        factors = CORRECTIONS[cfg.correction.kind](
            log_ratio_engine,
            batch.sequence_index,
            batch.num_sequences,
            cfg.correction.low,
            cfg.correction.high,
        )
        if cfg.correction.kind != "none":
            values = values * factors
            metrics["off_policy/correction"] = factors

    if batch.ref_logprobs is not None:
        metrics["policy/ref_kl"] = k3(current, batch.ref_logprobs)
        metrics["policy/ref_kl_k1"] = k1(current, batch.ref_logprobs)
        if cfg.kl.placement == "loss":
            penalty = KL_ESTIMATORS[cfg.kl.estimator](logprobs, batch.ref_logprobs)
            values = values + cfg.kl.coef * penalty

    if entropy is not None:
        metrics["policy/entropy"] = entropy.detach()
        if cfg.entropy_coef:
            values = values - cfg.entropy_coef * entropy
    return PolicyTerms(values, metrics, log_ratio_engine)
