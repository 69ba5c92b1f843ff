"""Generalised advantages and the value loss, by their definitions in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.algorithms.advantages import gae
from hone.algorithms.ppo import (
    PPO,
    ValueObjective,
    _value_metrics,  # pyright: ignore[reportPrivateUsage]
)
from hone.algorithms.settings import AlgorithmConfig, CriticConfig
from hone.observe.metrics import to_scalars
from hone.trainer.collating import collate
from hone.types import Column, Group, Prompt, Reward, Row, Sample, StopReason
from tests.tables import table

NUMBERS = st.floats(-3, 3)


def by_definition(
    rewards: list[float], values: list[float], drawn: list[bool], gamma: float, lam: float
) -> list[float]:
    """`sum_k (gamma lam)^k d_(t + k)` over an episode, with all sums written out and only drawn
    tokens as steps."""
    steps = [t for t, is_drawn in enumerate(drawn) if is_drawn]
    r, v = [rewards[t] for t in steps], [*(values[t] for t in steps), 0.0]
    deltas = [r[n] + gamma * v[n + 1] - v[n] for n in range(len(steps))]
    return [
        sum((gamma * lam) ** (k - n) * deltas[k] for k in range(n, len(steps)))
        for n in range(len(steps))
    ]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), max_size=12),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_R21_gae_is_its_definition_over_the_tokens_that_were_drawn(
    tokens: list[tuple[float, float, bool]], gamma: float, lam: float
) -> None:
    rewards, values, drawn = ([*column] for column in zip(*tokens, strict=True)) if tokens else (
        [], [], []
    )  # fmt: skip
    mask = torch.tensor(drawn, dtype=torch.bool)
    own = gae(
        torch.tensor(rewards, dtype=torch.float64)[mask],
        torch.tensor(values, dtype=torch.float64)[mask],
        gamma=gamma,
        lam=lam,
    )
    expected = by_definition(rewards, values, drawn, gamma, lam)
    assert own.tolist() == pytest.approx(expected, abs=1e-9)


def test_a_tool_between_two_tokens_neither_decays_nor_ends_an_advantage() -> None:
    """Values 0.5 and 0.2 around a tool's answer, reward 1, lambda 0.95: 0.46, not the 0.412 of a
    zero in its place."""
    values = torch.tensor([0.5, 0.2], dtype=torch.float64)
    rewards = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert gae(rewards, values, gamma=1.0, lam=0.95)[0].item() == pytest.approx(0.46)
    zeroed = gae(torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5, 0, 0.2]), gamma=1.0, lam=0.95)
    assert zeroed[0].item() == pytest.approx(0.412)


def group_of(rewards: list[float], mask: list[bool], stop: StopReason) -> Group:
    prompt = Prompt(id="p", token_ids=(1, 2), text="")
    samples = [
        Sample(
            id=f"p/{index}",
            prompt=prompt,
            index=index,
            token_ids=[3] * len(mask),
            logprobs=[-1.0] * len(mask),
            weight_versions=[0] * len(mask),
            loss_mask=list(mask),
            stop_reason=stop,
            reward=Reward(total=reward),
        )
        for index, reward in enumerate(rewards)
    ]
    return Group(id="p", prompt=prompt, samples=samples)


@table("stop", [StopReason.EOS, StopReason.LENGTH])
@table("kl", [{}, {"kl": {"coef": 0.5, "placement": "reward", "estimator": "k1"}}])
def test_targets_are_advantages_and_what_the_critic_learns(
    stop: StopReason, kl: dict[str, Any]
) -> None:
    """The reward is of the last token that the policy drew, also before one of an environment, and
    nothing is continued behind a truncation. Each token pays its own penalty."""
    cfg = AlgorithmConfig.model_validate({"advantage": "gae", "gamma": 0.9, "lam": 0.8, **kl})
    algorithm = PPO(cfg, CriticConfig(), max_completion_tokens=8)
    assert algorithm.needs.scores["critic"] == {"values"}
    batch = [group_of([1.0, -0.5], [True, False, True, False], stop)]
    rows = algorithm.rows(batch, 0)
    for number, row in enumerate(rows):
        row.columns["values/critic"] = Column(torch.tensor([0.3, 0.1 * number]))
        if kl:
            row.columns["logprobs/policy"] = Column(torch.tensor([-0.5, -0.2]))
            row.columns["logprobs/reference"] = Column(torch.tensor([-1.0, -1.0]))
    metrics = algorithm.targets(rows, batch)
    raw = []
    for reward, row in zip((1.0, -0.5), rows, strict=True):
        paid = [0.5 * 0.5, 0.5 * 0.8] if kl else [0.0, 0.0]
        v = row.column("values/critic").tolist()
        last = reward - paid[1] - v[1]
        raw.append([-paid[0] + 0.9 * v[1] - v[0] + 0.9 * 0.8 * last, last])
        returns = [a + b for a, b in zip(raw[-1], v, strict=True)]
        assert row.column("returns").tolist() == pytest.approx(returns, abs=1e-6)
    flat = torch.tensor(raw, dtype=torch.float64)
    expected = (flat - flat.mean()) / flat.std()
    own = torch.stack([row.column("advantages") for row in rows])
    torch.testing.assert_close(own.double(), expected, atol=1e-5, rtol=1e-5)
    found = to_scalars(metrics)
    assert found["critic/score/mean"] == 0.25
    assert found["critic/rewards/min"] == pytest.approx(-0.5 - sum(paid), abs=1e-6)
    assert found["critic/advantages/max"] == pytest.approx(float(expected.max()), abs=1e-5)
    assert {"critic/values/mean", "critic/returns/std", "critic/vf_explained_var"} <= found.keys()


@table(
    "errors, explained",
    [
        ([0.0] * 4, 1.0),
        ([3.0] * 4, 1.0),  # a bias is no variance
        ([1.0, -1.0, 1.0, -1.0], 1 - 1 / 5),
        ([-1.0, 1.0, 3.0, 5.0], 0.0),  # values are one constant
        ([6.0, -6.0, 6.0, -6.0], 1 - 36 / 5),
    ],
)
def test_explained_variance_is_its_definition(errors: list[float], explained: float) -> None:
    """Of returns of variance 5, by values that differ from them."""
    returns = torch.tensor([1.0, 3.0, 5.0, 7.0], dtype=torch.float64)
    values = returns - torch.tensor(errors, dtype=torch.float64)
    found = to_scalars(_value_metrics(values, returns))
    assert found["critic/vf_explained_var"] == pytest.approx(explained, abs=1e-12)
    assert found["critic/values/mean"] == pytest.approx(float(values.mean()))
    assert found["critic/returns/mean"] == 4.0


def values_batch(values: list[float], returns: list[float], old: list[float]) -> Any:
    number = len(values)
    columns = {
        "returns": Column(torch.tensor(returns)),
        "values/critic": Column(torch.tensor(old)),
    }
    row = Row(
        id="a", token_ids=[1] * (number + 1), loss_mask=[False] + [True] * number, columns=columns
    )
    return row, collate([row], [1.0], "cpu")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=8))
@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_value_loss_is_its_definition(
    clip: float | None, tokens: list[tuple[float, float, float]]
) -> None:
    values, returns, old = ([*column] for column in zip(*tokens, strict=True))
    row, batch = values_batch(values, returns, old)
    objective = ValueObjective(clip)
    assert objective.weights([row, replace(row)]) == [1 / (2 * len(values))] * 2
    loss = objective({"values": torch.tensor(values)}, batch)
    expected = []
    for v, r, o in zip(values, returns, old, strict=True):
        near = v if clip is None else min(max(v, o - clip), o + clip)
        expected.append(0.5 * max((v - r) ** 2, (near - r) ** 2))
    assert loss.values.tolist() == pytest.approx(expected, abs=1e-4, rel=1e-4)


def test_values_that_moved_less_than_the_clip_are_not_counted_as_clipped() -> None:
    """However they are rounded; of those that moved further, the ones that went from the return."""
    draw = torch.Generator().manual_seed(0)
    returns, moved = (torch.randn(4096, generator=draw) for _ in range(2))
    for clip in (0.2, 0.5):
        old = clip * (torch.rand(4096, generator=draw) - 0.5)
        values = clip * (torch.rand(4096, generator=draw) - 0.5)
        _, batch = values_batch(values.tolist(), returns.tolist(), old.tolist())
        loss = ValueObjective(clip)({"values": values}, batch)
        assert to_scalars(loss.metrics)["train/vf_clipfrac"] == 0.0
        assert torch.equal(loss.values, 0.5 * (values - returns).square())
        values = old + moved
        _, batch = values_batch(values.tolist(), returns.tolist(), old.tolist())
        loss = ValueObjective(clip)({"values": values}, batch)
        v, r, o = (x.double() for x in (values, returns, old))
        near = torch.minimum(torch.maximum(v, o - clip), o + clip)
        share = float(((near != v) & ((near - r).abs() > (v - r).abs())).double().mean())
        assert 0.05 < share < 0.5
        found = to_scalars(loss.metrics)["train/vf_clipfrac"]
        assert found == pytest.approx(share, abs=1e-3)


def test_a_value_that_went_far_enough_has_no_gradient() -> None:
    """Past the clip, away from where it was and towards its return; not on the way back."""
    values = torch.tensor([1.0, 1.0], requires_grad=True)
    _, batch = values_batch([0.0, 0.0], [2.0, -2.0], [0.0, 0.0])
    ValueObjective(0.5)({"values": values}, batch).values.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.0, 3.0]
