"""PPO with a critic, arXiv:1707.06347: advantages against the values of a second trained model.

Generalised advantage estimation (arXiv:1506.02438) runs over the tokens that the policy sampled and
skips those that an environment inserted. So a tool's answer neither decays nor ends an advantage,
as in verl's `compute_gae_advantage_return`; in OpenRLHF's `get_advantages_and_returns` each
inserted token is a step of value 0 and does both.

It runs over an episode, not over a row. Where an agent rewrote its history, the state after the
last token of a path is the context of the next one: the value there is that of the next path's
first token, and the reward is earned at the last token of the last path. An earlier path has no end
of its own, at which the reward would be earned once more and nothing would be left to come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hone.algorithms.advantages import ScoredSample, gae, whiten
from hone.algorithms.aggregation import AGGREGATIONS
from hone.algorithms.algorithm import Loss, Objective, Outputs
from hone.algorithms.grpo import GRPO
from hone.algorithms.settings import AlgorithmConfig, CriticConfig, Output
from hone.observe.metrics import Distribution, Last, Mean, Metrics
from hone.types import Group, LossExtent, MicroBatch, Row

__all__ = ["PPO", "ValueObjective"]


class PPO(GRPO):
    """PPO: the rows and the policy loss of GRPO, with advantages against a critic that learns.

    `objectives["critic"]` is the critic's loss. `targets` needs the column `values/critic`, [N]
    float32, of each row. Implements `Algorithm`.
    """

    def __init__(
        self, cfg: AlgorithmConfig, critic: CriticConfig, *, max_completion_tokens: int
    ) -> None:
        """`max_completion_tokens` is the divisor of the aggregation `constant`."""
        super().__init__(cfg, max_completion_tokens=max_completion_tokens)
        values = frozenset[Output]({"values"})
        self.needs = replace(
            self.needs,
            scores={**self.needs.scores, "critic": values},
            learns_after={"policy": critic.warmup_steps},
        )
        self.objectives: Mapping[str, Objective] = {
            **self.objectives,
            "critic": ValueObjective(critic.value_clip),
        }

    def targets(self, rows: Sequence[Row], batch: Sequence[Group]) -> Metrics:
        """Advantages, normalised over all tokens of the step by `whiten`, and the returns that the
        critic learns, [N] float32 each. Metrics have verl's names."""
        episodes = [episode for group in self._episodes(rows, batch) for episode in group]
        samples = [self._scored_sample(episode) for episode in episodes]
        values = [episode.column("values/critic").double() for episode in episodes]
        estimates = [
            gae(_token_rewards(sample), values_N, gamma=self.cfg.gamma, lam=self.cfg.lam)
            for sample, values_N in zip(samples, values, strict=True)
        ]
        (advantages,) = whiten([estimates])
        returns = [a + v for a, v in zip(estimates, values, strict=True)]
        for episode, advantages_N, returns_N in zip(episodes, advantages, returns, strict=True):
            episode.add_column("advantages", advantages_N)
            episode.add_column("returns", returns_N.float())
        if not any(map(len, values)):
            return {}
        return {
            "critic/score": Distribution.of([sample.reward for sample in samples]),
            "critic/rewards": Distribution.of([sample.penalised_reward for sample in samples]),
            "critic/advantages": Distribution.of(torch.cat(advantages)),
            **_value_metrics(torch.cat(values), torch.cat(returns)),
        }


def _token_rewards(sample: ScoredSample) -> Tensor:
    """The reward of each token, [N] float64: its negative KL penalty, plus the sample's reward at
    the last token."""
    rewards = -sample.penalties.double()
    if len(rewards):
        rewards[-1] += sample.reward
    return rewards


def _value_metrics(values: Tensor, returns: Tensor) -> Metrics:
    """Metrics of the values [N] before the update. `vf_explained_var` is 1 where values equal the
    returns, 0 for constant values and negative below that; verl adds 1e-5 to its divisor."""
    variance = (returns - returns.mean()).square().mean()
    residual = returns - values
    explained = 1 - (residual - residual.mean()).square().mean() / variance.clamp(min=1e-12)
    return {
        "critic/values": Distribution.of(values),
        "critic/returns": Distribution.of(returns),
        "critic/vf_explained_var": Last(float(explained)),
    }


class ValueObjective:
    """Half the squared distance of values from returns. Implements `Objective`.

    The loss is `0.5 max((V - R)^2, (clip(V) - R)^2)`, as in the published implementations, where
    clip(V) lies within `clip` of the value before the update. It is averaged over the trained
    tokens of an optimizer step.
    """

    outputs: frozenset[Output] = frozenset({"values"})
    outputs_before: frozenset[Output] = frozenset()
    columns = frozenset({"returns", "values/critic"})
    per: LossExtent = "trained"

    def __init__(self, clip: float | None) -> None:
        """`clip` is the largest change of a value; None clips nothing."""
        self._clip = clip

    def weights(self, rows: Sequence[Row]) -> list[float]:
        return AGGREGATIONS["token_mean"]([row.num_trained for row in rows], 0)

    def __call__(self, outputs: Outputs, batch: MicroBatch) -> Loss:
        values, returns = outputs["values"], batch.column("returns")
        losses = 0.5 * (values - returns).square()
        if self._clip is None:
            return Loss(losses)
        old = batch.column("values/critic")
        # `clamp` keeps a value within the limits bit for bit; `old + (values - old)` would round.
        clipped_values = values.clamp(old - self._clip, old + self._clip)
        clipped = 0.5 * (clipped_values - returns).square()
        is_clipped = clipped.detach() > losses.detach()
        return Loss(torch.maximum(losses, clipped), {"train/vf_clipfrac": Mean.of(is_clipped)})
