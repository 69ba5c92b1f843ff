"""Reinforcement and supervised training of one policy.

    for minibatch in minibatches(rows):          # one optimizer step each
        for batch in micro_batches(minibatch):   # one forward and backward each
            gradient += backward(loss(forward(batch)))
        clip, step

Every token's weight in the loss is settled over the whole mini-batch before the first forward, so
how it is cut into micro-batches cannot change the gradient.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hone.algorithms.aggregation import AGGREGATIONS
from hone.algorithms.corrections import importance_ratio
from hone.algorithms.kl import k3
from hone.algorithms.objective import Objective, policy_objective
from hone.checkpoint.sharded import StoredTensor
from hone.config.algorithm import AlgorithmConfig
from hone.config.trainer import SFTTrainerConfig, TrainerConfig
from hone.distributed.mesh import Mesh
from hone.models.adapters import adapters_off, is_adapted
from hone.observe.metrics import Distribution, Mean, Metrics, Sum, merge
from hone.trainer.learner import Learner
from hone.trainer.packing import on_device
from hone.types import MicroBatch, Trajectory

__all__ = ["PolicyTrainer", "SupervisedTrainer"]


class PolicyTrainer(Learner):
    """Trains on scored rollouts. Implements the `Trainer` protocol."""

    def __init__(
        self,
        model: PreTrainedModel,
        cfg: TrainerConfig,
        algorithm: AlgorithmConfig,
        *,
        temperature: float,
        max_completion_tokens: int,
        total_steps: int,
        seed: int = 0,
        reference: PreTrainedModel | None = None,
        dump_dir: Path | None = None,
        exact: bool = False,
        mesh: Mesh | None = None,
    ) -> None:
        """`temperature` is the one that sampled the rows, `total_steps` the optimizer steps of the
        run, `seed` orders mini-batches. `reference` is the frozen model of the KL penalty, where
        that is scored here; a model with adapters is its own, without them. `exact` and `mesh` as
        in `Learner`, for both models."""
        super().__init__(
            model,
            cfg,
            total_steps=total_steps,
            temperature=temperature,
            dump_dir=dump_dir,
            exact=exact,
            mesh=mesh,
        )
        if reference is not None:
            self._add_reference(reference)
        self.cfg = cfg
        self.algorithm = algorithm
        self.reference = reference
        self.num_updates = 0
        self._max_completion_tokens = max_completion_tokens
        self._seed = seed

    def logprobs(self, rows: Sequence[Trajectory], *, reference: bool = False) -> list[Tensor]:
        """Log-probability of each row's trained tokens, [N_i] float32 on the CPU, no gradient.

        Raises ValueError where the reference is asked for and there is none.
        """
        if not reference:
            return self._score_rows(self.policy.model, rows)
        if self.reference is None and is_adapted(self.policy.model):
            with adapters_off(self.policy.model):
                return self._score_rows(self.policy.model, rows)
        if self.reference is None:
            raise ValueError(
                "this trainer has no reference model: algorithm.kl.coef is 0, or it is elsewhere"
            )
        return self._score_rows(self.reference, rows)

    def update(self, rows: Sequence[Trajectory]) -> Metrics:
        """Train on the rows of one rollout: `num_epochs` passes in mini-batches of whole groups.

        Rows need `advantages`. Raises NonFiniteError for numbers that are not finite, and
        ValueError for a row that does not fit into a micro-batch.
        """
        self._agree(rows, [])
        self._check(rows)
        minibatches = list(self._minibatches(rows))
        if self.needs_old_logprobs(rows):
            minibatches = self._with_old_logprobs(rows, minibatches)
        metrics = merge(*(self.train(minibatch) for minibatch in minibatches))
        self.num_updates += 1
        return metrics

    def needs_old_logprobs(self, rows: Sequence[Trajectory]) -> bool:
        """Whether `update` makes several optimizer steps on `rows`, so that it takes the policy's
        log-probabilities before the first of them, unless rows have them."""
        num_groups = len(_by_group(rows))
        return self.cfg.num_epochs > 1 or num_groups > self._groups_per_minibatch(num_groups)

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, metadata = super().state_dict()
        return tensors, metadata | {"num_updates": self.num_updates}

    def load_state_dict(
        self, tensors: Mapping[str, Tensor | StoredTensor], metadata: Mapping[str, Any]
    ) -> None:
        super().load_state_dict(tensors, metadata)
        self.num_updates = metadata["num_updates"]

    def forward_backward(self, rows: Sequence[Trajectory]) -> tuple[Tensor, Metrics]:
        num_trained = [row.num_trained for row in rows]
        weights = AGGREGATIONS[self.algorithm.aggregation](num_trained, self._max_completion_tokens)
        loss = torch.zeros((), device=self.policy.device)
        num_passes = 0
        shards: list[Metrics] = []
        log_ratios: list[Tensor] = []
        fresh: list[Tensor] = []
        for batch in self._passes(rows, weights):
            num_passes += 1
            logprobs, entropy = self._score(self.policy.model, batch, with_entropy=True)
            if not batch.ids:
                (0.0 * logprobs.sum()).backward()
                continue
            batch = on_device(batch, self.policy.device)
            objective, batch_loss = self._backward(logprobs, entropy, batch)
            loss += batch_loss
            shards.append({key: Mean.of(value) for key, value in objective.token_metrics.items()})
            if objective.log_ratio_engine is not None:
                log_ratios.append(objective.log_ratio_engine)
                fresh.append(_is_fresh(batch))
        metrics = merge(*shards)
        if log_ratios:
            log_ratio = torch.cat(log_ratios)
            mismatch = log_ratio[torch.cat(fresh)]
            metrics["off_policy/ratio"] = Distribution.of(importance_ratio(log_ratio))
            metrics["off_policy/mismatch_kl"] = Mean.of(k3(torch.zeros_like(mismatch), mismatch))
        loss, metrics = self._merge_ranks(loss, metrics)
        return loss, metrics | {"train/num_micro_batches": Sum(num_passes)}

    def _backward(
        self, logprobs: Tensor, entropy: Tensor | None, batch: MicroBatch
    ) -> tuple[Objective, Tensor]:
        """Add one micro-batch to the gradient; nothing here waits for the device."""
        logprobs.retain_grad()
        objective = policy_objective(logprobs, entropy, batch, self.algorithm)
        loss = (objective.values * batch.weights).sum()
        loss.backward()
        assert logprobs.grad is not None
        objective.token_metrics["train/share_with_gradient"] = logprobs.grad != 0
        return objective, loss.detach()

    def _minibatches(self, rows: Sequence[Trajectory]) -> Iterator[list[Trajectory]]:
        """Rows of each optimizer step: every epoch draws its own order of groups."""
        groups = _by_group(rows)
        size = self._groups_per_minibatch(len(groups))
        for epoch in range(self.cfg.num_epochs):
            order = list(groups)
            random.Random(f"{self._seed}/minibatch/{self.num_updates}/{epoch}").shuffle(order)
            for start in range(0, max(len(order), 1), size):
                yield [row for group in order[start : start + size] for row in groups[group]]

    def _groups_per_minibatch(self, num_groups: int) -> int:
        return self.cfg.prompts_per_minibatch or max(num_groups, 1)

    def _with_old_logprobs(
        self, rows: Sequence[Trajectory], minibatches: list[list[Trajectory]]
    ) -> list[list[Trajectory]]:
        """Remember the policy before the first of several optimizer steps, where rows do not."""
        missing = [row for row in rows if row.old_logprobs is None]
        scored = {
            id(row): replace(row, old_logprobs=logprobs)
            for row, logprobs in zip(missing, self.logprobs(missing), strict=True)
        }
        return [[scored.get(id(row), row) for row in minibatch] for minibatch in minibatches]

    def _check(self, rows: Sequence[Trajectory]) -> None:
        """Refuse rows with missing or non-finite values, naming the row."""
        needs_reference = self.algorithm.kl.coef > 0 and self.algorithm.kl.placement == "loss"
        for row in rows:
            if row.advantages is None or (needs_reference and row.ref_logprobs is None):
                name = "advantages" if row.advantages is None else "ref_logprobs"
                raise ValueError(f"sequence {row.id!r} has no {name}, which this objective needs")
        for name in ("advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs"):
            values = [v for row in rows if (v := getattr(row, name)) is not None]
            if values and not bool(torch.cat(values).isfinite().all()):
                culprit = next(r for r in rows if not getattr(r, name).isfinite().all())
                self._stop(f"{name} of sequence {culprit.id!r}", rows)


def _by_group(rows: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    groups: dict[str, list[Trajectory]] = {}
    for row in rows:
        groups.setdefault(row.group_id or row.id, []).append(row)
    return groups


def _is_fresh(batch: MicroBatch) -> Tensor:
    """Tokens sampled by the very weights that the rollout is trained from, [N] bool.

    Only these tell how well engine and trainer agree: others also differ by the updates since.
    """
    if batch.staleness is None:
        return torch.ones_like(batch.labels, dtype=torch.bool)
    return batch.staleness == 0


class SupervisedTrainer(Learner):
    """Trains on demonstrations: cross-entropy, averaged over the trained tokens of a step."""

    def __init__(
        self,
        model: PreTrainedModel,
        cfg: SFTTrainerConfig,
        *,
        total_steps: int,
        dump_dir: Path | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(model, cfg, total_steps=total_steps, dump_dir=dump_dir, mesh=mesh)

    def update(self, rows: Sequence[Trajectory]) -> Metrics:
        """One optimizer step on the mean cross-entropy of the rows' trained tokens.

        Raises as `PolicyTrainer.update`.
        """
        return self.train(rows)

    def forward_backward(self, rows: Sequence[Trajectory]) -> tuple[Tensor, Metrics]:
        weights = AGGREGATIONS["token_mean"]([row.num_trained for row in rows], 0)
        loss = torch.zeros((), device=self.policy.device)
        for batch in self._passes(rows, weights):
            logprobs, _ = self._score(self.policy.model, batch, with_entropy=False)
            batch_loss = -(logprobs * batch.weights.to(logprobs.device)).sum()
            batch_loss.backward()
            loss += batch_loss.detach()
        return self._merge_ranks(loss, {})

    def evaluate(self, rows: Sequence[Trajectory]) -> Metrics:
        """Mean cross-entropy over the trained tokens, in nats; no gradient."""
        return {"eval/loss": Mean.of(-torch.cat(self._score_rows(self.policy.model, rows)))}
