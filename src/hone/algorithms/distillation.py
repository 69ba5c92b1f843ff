"""On-policy distillation: the policy samples, and a teacher's log-probabilities are the target.

`Distillation` is a policy gradient. The advantage of a trained token is
`log p_teacher - log p_policy`. Its expectation over the policy's samples is the negative reverse
KL, so the policy gradient is that of the divergence of a token's distribution (MiniLLM,
arXiv:2306.08543; GKD, arXiv:2306.13649; Thinking Machines, "On-Policy Distillation", 2025). No
credit flows from one token to another (discount 0). The baseline is the mean over the step's
tokens, as in tinker-cookbook; the baseline of arXiv:2605.07865, the divergence of each token's
distribution, would need the logits of the whole vocabulary.

`DivergingFromTeacher` minimises a divergence between the two distributions of each token directly
(`divergences.py`), at the positions that the policy sampled. No gradient flows through the
probability of the sampled tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from hone.algorithms.algorithm import Loss, Objective, Outputs
from hone.algorithms.divergences import DIVERGENCES
from hone.algorithms.grpo import GRPO
from hone.algorithms.objective import PolicyObjective
from hone.algorithms.settings import AlgorithmConfig, Output, TeacherConfig
from hone.observe.metrics import Mean, Metrics
from hone.types import Column, Group, MicroBatch, Row

__all__ = ["Distillation", "DivergenceObjective", "DivergingFromTeacher"]


class Distillation(GRPO):
    """The rows and the policy loss of GRPO with advantages from a teacher; implements `Algorithm`.

    GRPO's advantages of rewards are added, multiplied by `teacher.reward_coef`.
    """

    def __init__(
        self, cfg: AlgorithmConfig, teacher: TeacherConfig, *, max_completion_tokens: int
    ) -> None:
        """`max_completion_tokens` as in `PolicyObjective`."""
        super().__init__(cfg, max_completion_tokens=max_completion_tokens)
        self._reward_coef = teacher.reward_coef
        logprobs = frozenset[Output]({"logprobs"})
        self.needs = replace(
            self.needs,
            scores={**self.needs.scores, "policy": logprobs, "teacher": logprobs},
            samples_per_group=self.needs.samples_per_group if teacher.reward_coef else 1,
        )

    def targets(self, rows: Sequence[Row], batch: Sequence[Group]) -> Metrics:
        """Advantages, one for each trained token."""
        metrics = super().targets(rows, batch) if self._reward_coef else Metrics()
        gaps = [
            row.column("logprobs/teacher").double() - row.column("logprobs/policy").double()
            for row in rows
        ]
        all_gaps = torch.cat([torch.empty(0, dtype=torch.float64), *gaps])  # [N] of the step
        baseline = all_gaps.mean() if len(all_gaps) else 0.0
        for row, gap in zip(rows, gaps, strict=True):
            advantages = gap - baseline
            if self._reward_coef:
                advantages += self._reward_coef * row.column("advantages").double()
            row.columns["advantages"] = Column(advantages.float())
        return metrics | {"teacher/kl": Mean.of(-all_gaps)}


class DivergingFromTeacher(GRPO):
    """The rows of GRPO, trained on a divergence from the teacher; implements `Algorithm`.

    The policy loss of GRPO's advantages is added, multiplied by `teacher.reward_coef`.
    """

    def __init__(
        self, cfg: AlgorithmConfig, teacher: TeacherConfig, *, max_completion_tokens: int
    ) -> None:
        """`max_completion_tokens` as in `PolicyObjective`."""
        super().__init__(cfg, max_completion_tokens=max_completion_tokens)
        self._reward_coef = teacher.reward_coef
        top = frozenset[Output]({"top_ids", "top_logprobs"})
        self.needs = replace(
            self.needs,
            scores={**self.needs.scores, "teacher": top},
            samples_per_group=self.needs.samples_per_group if teacher.reward_coef else 1,
        )
        objective = DivergenceObjective(cfg, teacher, max_completion_tokens=max_completion_tokens)
        self.objectives: Mapping[str, Objective] = {"policy": objective}

    def targets(self, rows: Sequence[Row], batch: Sequence[Group]) -> Metrics:
        """Advantages of rewards (0 without `reward_coef`), and the K token ids of each position at
        which policy and teacher are compared."""
        metrics = super().targets(rows, batch) if self._reward_coef else Metrics()
        for row in rows:
            advantages = torch.zeros(row.num_trained)
            if self._reward_coef:
                advantages = self._reward_coef * row.column("advantages")
            row.columns["advantages"] = Column(advantages)
            row.columns["at_ids"] = row.columns.pop("top_ids/teacher")
        return metrics


class DivergenceObjective(PolicyObjective):
    """The objective of a policy plus a divergence from the teacher over the teacher's K likeliest
    tokens. Implements `Objective`."""

    outputs: frozenset[Output] = frozenset({"logprobs", "entropy", "logprobs_at"})

    def __init__(
        self, cfg: AlgorithmConfig, teacher: TeacherConfig, *, max_completion_tokens: int
    ) -> None:
        super().__init__(cfg, max_completion_tokens=max_completion_tokens)
        self.columns |= {"at_ids", "top_logprobs/teacher"}
        self._divergence = DIVERGENCES[teacher.loss]

    def __call__(self, outputs: Outputs, batch: MicroBatch) -> Loss:
        loss = super().__call__(outputs, batch)
        values = self._divergence(outputs["logprobs_at"], batch.column("top_logprobs/teacher"))
        metrics: Metrics = {"teacher/divergence": Mean.of(values.detach())}
        return Loss(loss.values + values, loss.metrics | metrics)
