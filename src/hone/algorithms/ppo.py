"""PPO with a critic, arXiv:1707.06347: advantages against the values of a model that learns too.

Generalised advantage estimation (arXiv:1506.02438) over the tokens that the policy drew: those of
an environment, which nothing predicts, lie between two of them as if they were not there. As in
verl's `compute_gae_advantage_return`, a tool's answer neither decays an advantage nor ends it;
OpenRLHF's `get_advantages_and_returns` makes each of its tokens a step of value 0, which does.
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
from hone.config.algorithm import AlgorithmConfig, CriticConfig, Output
from hone.observe.metrics import Distribution, Last, Mean, Metrics
from hone.types import Column, Group, LossExtent, MicroBatch, Row

__all__ = ["PPO", "ValueObjective"]


class PPO(GRPO):
    """PPO: the rows and the policy loss of GRPO, with advantages against a critic that learns.

    `objectives["critic"]` is the critic's loss. `targets` needs the column `values/critic`, [N]
    float32, of each row. Implements `Algorithm`.
    """

    def __init__(
        self, cfg: AlgorithmConfig, critic: CriticConfig, *, max_completion_tokens: int
    ) -> None:
        """`max_completion_tokens` is the longest completion, as in `GRPO`."""
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
        """Advantages, normalised over all tokens of the step, and the returns that the critic
        learns. The former are divided by the standard deviation (N - 1) plus 1e-6, in verl by
        `sqrt(variance + 1e-8)`, in OpenRLHF by that of N. Metrics have verl's names."""
        samples = [sample for group in self._scored(rows, batch) for sample in group]
        values = [row.column("values/critic").double() for row in rows]
        estimates = [
            gae(_rewards(sample), own, gamma=self.cfg.gamma, lam=self.cfg.lam)
            for sample, own in zip(samples, values, strict=True)
        ]
        (advantages,) = whiten([estimates])
        returns = [a + v for a, v in zip(estimates, values, strict=True)]
        for row, advantage, to_learn in zip(rows, advantages, returns, strict=True):
            row.columns["advantages"] = Column(advantage)
            row.columns["returns"] = Column(to_learn.float())
        if not any(map(len, values)):
            return {}
        return {
            "critic/score": Distribution.of([sample.reward for sample in samples]),
            "critic/rewards": Distribution.of([sample.penalised_reward for sample in samples]),
            "critic/advantages": Distribution.of(torch.cat(advantages)),
            **_value_metrics(torch.cat(values), torch.cat(returns)),
        }


def _rewards(sample: ScoredSample) -> Tensor:
    """Of each token, [N] float64: the KL penalty that it pays, and at the last what the sample has
    earned."""
    rewards = -sample.penalties.double()
    if len(rewards):
        rewards[-1] += sample.reward
    return rewards


def _value_metrics(values: Tensor, returns: Tensor) -> Metrics:
    """Before the update. `vf_explained_var` is 1 for values that are the returns, 0 for a constant,
    negative for worse; verl adds 1e-5 to the variance that it divides by."""
    spread = (returns - returns.mean()).square().mean()
    residual = returns - values
    explained = 1 - (residual - residual.mean()).square().mean() / spread.clamp(min=1e-12)
    return {
        "critic/values": Distribution.of(values),
        "critic/returns": Distribution.of(returns),
        "critic/vf_explained_var": Last(float(explained)),
    }


class ValueObjective:
    """Half the squared distance of values from returns. Implements `Objective`.

    A value moves no further than `clip` from what it was before the update and keeps its gradient
    only as long as that is the worse of the two: `0.5 max((V - R)^2, (clip(V) - R)^2)`, as in the
    published implementations; averaged over the trained tokens of an optimizer step.
    """

    outputs: frozenset[Output] = frozenset({"values"})
    outputs_before: frozenset[Output] = frozenset()
    columns = frozenset({"returns", "values/critic"})
    per: LossExtent = "trained"

    def __init__(self, clip: float | None) -> None:
        """None clips nothing."""
        self._clip = clip

    def weights(self, rows: Sequence[Row]) -> list[float]:
        return AGGREGATIONS["token_mean"]([row.num_trained for row in rows], 0)

    def __call__(self, outputs: Outputs, batch: MicroBatch) -> Loss:
        values, returns = outputs["values"], batch.column("returns")
        losses = 0.5 * (values - returns).square()
        if self._clip is None:
            return Loss(losses)
        old = batch.column("values/critic")
        near = values.clamp(old - self._clip, old + self._clip)  # else the value, to the last bit
        clipped = 0.5 * (near - returns).square()
        is_clipped = clipped.detach() > losses.detach()
        return Loss(torch.maximum(losses, clipped), {"train/vf_clipfrac": Mean.of(is_clipped)})
