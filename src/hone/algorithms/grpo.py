"""GRPO and its kin: policy gradients whose baseline comes from samples, not from a critic.

One algorithm with three choices, each a pure function: the advantage (`advantages.py`), the
loss of a token (`losses.py`) and how tokens are averaged (`aggregation.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hone.algorithms.advantages import ADVANTAGES, ScoredSample
from hone.algorithms.algorithm import Objective
from hone.algorithms.kl import KL_ESTIMATORS
from hone.algorithms.objective import PolicyObjective
from hone.config.algorithm import AlgorithmConfig
from hone.observe.metrics import Metrics, Sum
from hone.types import NOT_SAMPLED, Column, Group, Routes, Row, Sample

__all__ = ["GRPO"]


class GRPO:
    """GRPO and its kin (Dr.GRPO, RLOO, REINFORCE++; PPO clip, GSPO, CISPO, SAPO) as `cfg` says.

        algorithm = GRPO(AlgorithmConfig(), max_completion_tokens=1024)
        rows = algorithm.rows(groups, version=step - 1)  # token ids, masks, log-probabilities
        algorithm.targets(rows, groups)                  # the column `advantages`, [N] float32

    `objectives["policy"]` is the loss for the trainer. Implements `Algorithm`.
    """

    def __init__(self, cfg: AlgorithmConfig, *, max_completion_tokens: int) -> None:
        """`max_completion_tokens`, the longest completion, is what the aggregation `constant`
        divides by."""
        self.cfg = cfg
        self.needs = cfg.needs
        self.objectives: Mapping[str, Objective] = {
            "policy": PolicyObjective(cfg, max_completion_tokens=max_completion_tokens)
        }

    def rows(self, batch: Sequence[Group], version: int) -> list[Row]:
        """One row for each valid sample, in order, of the groups that have enough of them. Failed
        samples leave no trace. `version` is that of the weights that are about to be trained."""
        rows = [
            _row(sample, group, version)
            for group in self._usable(batch)
            for sample in group.valid_samples
        ]
        self._agree_on_routes(rows)
        return rows

    def _agree_on_routes(self, rows: Sequence[Row]) -> None:
        """A run that goes on with replay switched on or off has samples of before."""
        recorded = [row.column("routes") for row in rows if "routes" in row.columns]
        if len(recorded) == len(rows):
            return
        for row in rows:
            if not self.cfg.routing_replay:
                row.columns.pop("routes", None)
            elif recorded and "routes" not in row.columns:
                none = recorded[0][:0].numpy()
                row.columns["routes"] = Column(_of_all_tokens(none, row.num_tokens), per="token")

    def targets(self, rows: Sequence[Row], batch: Sequence[Group]) -> Metrics:
        """Advantages, one for each trained token."""
        scored = self._scored(rows, batch)
        assert self.cfg.advantage != "gae", "against a critic: PPO"
        advantages = ADVANTAGES[self.cfg.advantage].estimate(scored)
        for row, values in zip(rows, (a for group in advantages for a in group), strict=True):
            row.columns["advantages"] = Column(values)
        return {"rollout/groups_without_baseline": Sum(len(batch) - len(scored))}

    def _usable(self, batch: Sequence[Group]) -> list[Group]:
        needed = self.needs.samples_per_group
        return [group for group in batch if len(group.valid_samples) >= needed]

    def _scored(self, rows: Sequence[Row], batch: Sequence[Group]) -> list[list[ScoredSample]]:
        """The samples of which `rows` were made, by group, as estimators see them."""
        of_samples = iter(rows)
        return [
            [self._scored_sample(sample, next(of_samples)) for sample in group.valid_samples]
            for group in self._usable(batch)
        ]

    def _scored_sample(self, sample: Sample, row: Row) -> ScoredSample:
        assert sample.reward is not None, sample.id
        if not self.cfg.penalises_reward:
            return ScoredSample(sample.reward.total, torch.zeros(row.num_trained))
        divergence = KL_ESTIMATORS[self.cfg.kl.estimator](
            row.column("logprobs/policy"), row.column("logprobs/reference")
        )
        return ScoredSample(sample.reward.total, self.cfg.kl.coef * divergence)


def _row(sample: Sample, group: Group, version: int) -> Row:
    """Token ids as they were sampled, the mask as it was recorded.

    A token that the present weights have drawn after older ones counts as stale: it may have been
    drawn over keys and values of theirs, so that the trainer cannot find its log-probability again.
    What an environment inserted is of no weights, and has no age.
    """
    mask = np.asarray(sample.loss_mask, dtype=bool)
    logprobs = np.asarray(sample.logprobs)[mask].astype(np.float32)
    drawn = np.asarray(sample.weight_versions, dtype=np.int32)
    ages = np.where(drawn == NOT_SAMPLED, 0, version - drawn)
    staleness = np.maximum.accumulate(ages)[mask].astype(np.int32)
    columns = {
        "logprobs/engine": Column(torch.from_numpy(logprobs)),
        "staleness": Column(torch.from_numpy(staleness)),
    }
    token_ids = [*sample.prompt.token_ids, *sample.token_ids]
    if sample.routes is not None:
        columns["routes"] = Column(_of_all_tokens(sample.routes, len(token_ids)), per="token")
    return Row(
        id=sample.id,
        group_id=group.id,
        token_ids=token_ids,
        loss_mask=[False] * len(sample.prompt.token_ids) + mask.tolist(),
        columns=columns,
    )


def _of_all_tokens(routes: Routes, num_tokens: int) -> Tensor:
    """Of all tokens, where the router chooses for itself behind those that were recorded: for the
    last token, and for what was inserted behind the last turn."""
    found = np.full((num_tokens, *routes.shape[1:]), np.iinfo(routes.dtype).max, routes.dtype)
    found[: len(routes)] = routes
    return torch.from_numpy(found)
