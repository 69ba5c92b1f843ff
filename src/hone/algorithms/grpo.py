"""GRPO and its kin: policy gradients whose baseline comes from samples, not from a critic.

One algorithm with three choices, each a pure function: the advantage (`advantages.py`), the
loss of a token (`losses.py`) and how tokens are averaged (`aggregation.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hone.algorithms.advantages import ADVANTAGES, ScoredSample
from hone.algorithms.algorithm import Objective
from hone.algorithms.kl import KL_ESTIMATORS
from hone.algorithms.objective import PolicyObjective
from hone.algorithms.rows import Episode, episodes_of, padded_routes, rows_of
from hone.algorithms.settings import AlgorithmConfig
from hone.observe.metrics import Metrics, Sum
from hone.types import Column, Group, Row

__all__ = ["GRPO"]


class GRPO:
    """GRPO and its kin: any of `ADVANTAGES` with any of `LOSSES`, as `cfg` says.

        algorithm = GRPO(AlgorithmConfig(), max_completion_tokens=1024)
        rows = algorithm.rows(groups, version=step - 1)  # token ids, masks, log-probabilities
        algorithm.targets(rows, groups)                  # the column `advantages`, [N] float32

    `objectives["policy"]` is the loss for the trainer. Implements `Algorithm`.
    """

    def __init__(self, cfg: AlgorithmConfig, *, max_completion_tokens: int) -> None:
        """`max_completion_tokens` is the divisor of the aggregation `constant`."""
        self.cfg = cfg
        self.needs = cfg.needs
        self.objectives: Mapping[str, Objective] = {
            "policy": PolicyObjective(cfg, max_completion_tokens=max_completion_tokens)
        }

    def rows(self, batch: Sequence[Group], version: int) -> list[Row]:
        """The rows of each valid sample, in order, of each group that has enough valid samples; one
        row each where no history was rewritten. Failed samples get no row. `version` is that of the
        weights about to be trained."""
        rows = [
            row
            for group in self._usable(batch)
            for sample in group.valid_samples
            for row in rows_of(sample, group.id, version)
        ]
        self._agree_on_routes(rows)
        return rows

    def _agree_on_routes(self, rows: Sequence[Row]) -> None:
        """Give either all rows the column `routes` or none: a run that was resumed with
        `routing_replay` switched on or off still has samples of the other kind."""
        recorded = [row.column("routes") for row in rows if "routes" in row.columns]
        if len(recorded) == len(rows):
            return
        for row in rows:
            if not self.cfg.routing_replay:
                row.columns.pop("routes", None)
            elif recorded and "routes" not in row.columns:
                no_routes = recorded[0][:0].numpy()
                routes = padded_routes(no_routes, row.num_tokens)
                row.columns["routes"] = Column(routes, per="token")

    def targets(self, rows: Sequence[Row], batch: Sequence[Group]) -> Metrics:
        """Advantages, one for each trained token."""
        assert self.cfg.advantage != "gae", "gae needs a critic: PPO"
        groups = self._episodes(rows, batch)
        scored = [[self._scored_sample(episode) for episode in group] for group in groups]
        advantages = ADVANTAGES[self.cfg.advantage].estimate(scored)
        for group, values in zip(groups, advantages, strict=True):
            for episode, values_N in zip(group, values, strict=True):
                episode.add_column("advantages", values_N)
        return {"rollout/groups_without_baseline": Sum(len(batch) - len(groups))}

    def _usable(self, batch: Sequence[Group]) -> list[Group]:
        needed = self.needs.samples_per_group
        return [group for group in batch if len(group.valid_samples) >= needed]

    def _episodes(self, rows: Sequence[Row], batch: Sequence[Group]) -> list[list[Episode]]:
        """The samples from which `rows` were made with their rows, by group."""
        own = iter([rows[i] for i in indices] for indices in episodes_of(rows))
        return [
            [Episode(sample, next(own)) for sample in group.valid_samples]
            for group in self._usable(batch)
        ]

    def _scored_sample(self, episode: Episode) -> ScoredSample:
        """An episode for the estimators. Its KL penalties are those of all of its rows."""
        reward = episode.sample.reward
        assert reward is not None, episode.sample.id
        if not self.cfg.penalises_reward:
            return ScoredSample(reward.total, torch.zeros(episode.num_trained))
        divergence = KL_ESTIMATORS[self.cfg.kl.estimator](
            episode.column("logprobs/policy"), episode.column("logprobs/reference")
        )
        return ScoredSample(reward.total, self.cfg.kl.coef * divergence)
