"""On-policy distillation: advantages in float64, and the gradient of the divergence itself."""

from __future__ import annotations

from statistics import fmean, stdev
from typing import Any

import pytest
import torch

from hone.algorithms.advantages import ADVANTAGES, EstimatorName, ScoredSample
from hone.algorithms.distillation import Distillation, DivergenceObjective, DivergingFromTeacher
from hone.algorithms.divergences import DIVERGENCES
from hone.algorithms.objective import PolicyObjective
from hone.algorithms.settings import AlgorithmConfig, TeacherConfig
from hone.observe.metrics import to_scalars
from hone.trainer.collating import collate
from hone.types import Column, Row, StopReason
from tests.algorithms.test_ppo import group_of
from tests.tables import table

MASK = [True, False, True]
POLICY = [[-0.5, -0.2], [-1.0, -2.5], [-0.1, -0.3]]
TEACHER = [[-0.4, -3.0], [-1.5, -0.5], [-0.1, -0.7]]


def completed(
    reward_coef: float, rewards: list[float], **algorithm: Any
) -> tuple[list[Row], dict[str, float]]:
    """Rows of a group, of which the third sample may fail, and the metrics."""
    cfg = AlgorithmConfig.model_validate(algorithm)
    teacher = TeacherConfig(path="teacher", reward_coef=reward_coef)
    algorithm_ = Distillation(cfg, teacher, max_completion_tokens=8)
    batch = [group_of(rewards, MASK, StopReason.EOS)]
    rows = algorithm_.rows(batch, 0)
    for row, policy, scored in zip(rows, POLICY, TEACHER, strict=False):
        row.columns["logprobs/policy"] = Column(torch.tensor(policy))
        row.columns["logprobs/teacher"] = Column(torch.tensor(scored))
    return rows, to_scalars(algorithm_.targets(rows, batch))


@table("reward_coef", [0.0, 0.5])
@table("advantage", ["grpo", "rloo", "reinforce_pp"])
def test_advantages_are_their_definition(reward_coef: float, advantage: EstimatorName) -> None:
    rewards = [1.0, 0.0, 0.25]
    rows, metrics = completed(reward_coef, rewards, advantage=advantage)
    kl = [p - t for of_row, scored in zip(POLICY, TEACHER, strict=True)
          for p, t in zip(of_row, scored, strict=True)]  # fmt: skip
    mean = sum(kl) / len(kl)
    sequences = [ScoredSample(reward, torch.zeros(sum(MASK))) for reward in rewards]
    earned = torch.cat(ADVANTAGES[advantage].estimate([sequences])[0]).tolist()
    expected = [mean - k + reward_coef * a for k, a in zip(kl, earned, strict=True)]
    own = torch.cat([row.column("advantages") for row in rows])
    assert own.tolist() == pytest.approx(expected, abs=1e-6)
    assert metrics["teacher/kl"] == pytest.approx(mean, abs=1e-6)


@table("loss", [*DIVERGENCES])
@table("reward_coef", [0.0, 0.5, 2.0])
def test_rewards_beside_a_divergence_weigh_as_they_are_set_to(
    loss: str, reward_coef: float
) -> None:
    """The advantages that GRPO takes of them, times the coefficient; 0 where they do not count."""
    cfg, rewards = AlgorithmConfig(), [1.0, 0.0, 0.25]
    teacher = TeacherConfig.model_validate(
        {"path": "t", "loss": loss, "reward_coef": reward_coef, "top_k": 2}
    )
    algorithm = DivergingFromTeacher(cfg, teacher, max_completion_tokens=8)
    batch = [group_of(rewards, MASK, StopReason.EOS)]
    rows = algorithm.rows(batch, 0)
    ids = [torch.randint(9, (row.num_trained, 2)) for row in rows]
    for row, own in zip(rows, ids, strict=True):
        row.columns["top_ids/teacher"] = Column(own)
    algorithm.targets(rows, batch)
    mean, deviation = fmean(rewards), stdev(rewards)
    for row, own, reward in zip(rows, ids, rewards, strict=True):
        earned = reward_coef * (reward - mean) / (deviation + 1e-6)
        assert row.column("advantages").tolist() == pytest.approx([earned] * 2, abs=1e-6)
        assert torch.equal(row.column("at_ids"), own)
        assert "top_ids/teacher" not in row.columns


def test_the_loss_of_a_divergence_is_added_to_that_of_the_rewards() -> None:
    """As much a token as its formula says, in float64."""
    cfg = AlgorithmConfig()
    teacher = TeacherConfig.model_validate({"path": "t", "loss": "forward_kl", "reward_coef": 1.0})
    draw = torch.Generator().manual_seed(0)
    own, scored = (
        torch.randn(3, 9, generator=draw, dtype=torch.float64).log_softmax(-1)[:, :4]
        for _ in range(2)
    )
    logprobs = torch.randn(3, generator=draw, dtype=torch.float64)
    row = Row(
        id="a",
        token_ids=[1] * 4,
        loss_mask=[False, True, True, True],
        columns={
            "advantages": Column(torch.tensor([1.0, -2.0, 0.5])),
            "at_ids": Column(torch.zeros(3, 4, dtype=torch.int64)),
            "top_logprobs/teacher": Column(scored),
        },
    )
    outputs = {"logprobs": logprobs, "entropy": torch.zeros(3), "logprobs_at": own}
    batch = collate([row], [1.0], "cpu")
    both = DivergenceObjective(cfg, teacher, max_completion_tokens=8)(outputs, batch).values
    rewards = PolicyObjective(cfg, max_completion_tokens=8)(outputs, batch).values
    expected = DIVERGENCES["forward_kl"](own, scored)
    torch.testing.assert_close((both - rewards).double(), expected, atol=1e-6, rtol=1e-6)


def test_a_teacher_alone_needs_no_group() -> None:
    """Beside rewards, whose baseline is the group, one sample is too few."""
    rows, metrics = completed(0.0, [1.0])
    assert len(rows) == 1
    assert float(rows[0].column("advantages").sum()) == pytest.approx(0, abs=1e-6)
    assert "teacher/kl" in metrics
    rows, metrics = completed(0.5, [1.0])
    assert rows == []
    assert "teacher/kl" not in metrics


def test_what_it_asks_of_models() -> None:
    """The teacher has no gradient: it is asked for before the update, as a column."""
    cfg, teacher = AlgorithmConfig(), TeacherConfig(path="teacher")
    algorithm = Distillation(cfg, teacher, max_completion_tokens=8)
    assert algorithm.needs.scores == {"policy": {"logprobs"}, "teacher": {"logprobs"}}
    assert algorithm.objectives.keys() == {"policy"}


def test_the_expected_gradient_is_that_of_the_reverse_kl() -> None:
    """Over all words of one token, each as often as the policy draws it: whatever the baseline."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    divergence = (logprobs.exp() * (logprobs - teacher)).sum()
    (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)

    algorithm = Distillation(
        AlgorithmConfig(), TeacherConfig(path="teacher"), max_completion_tokens=8
    )
    batch = [group_of([0.0] * 7, [True], StopReason.EOS)]
    rows = algorithm.rows(batch, 0)
    for row, own, scored in zip(rows, logprobs.detach(), teacher, strict=True):
        row.columns["logprobs/policy"] = Column(own[None])
        row.columns["logprobs/teacher"] = Column(scored[None])
    algorithm.targets(rows, batch)
    advantages = torch.cat([row.column("advantages") for row in rows]).double()
    loss = -(logprobs.detach().exp() * advantages * logprobs).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-6)
