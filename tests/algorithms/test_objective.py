"""The objective of a micro-batch and its metrics, token by token, by their equations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hone.algorithms.algorithm import Outputs
from hone.algorithms.objective import PolicyObjective, policy_objective
from hone.algorithms.settings import AlgorithmConfig
from hone.observe.metrics import to_scalars
from hone.types import MicroBatch
from tests.tables import table

ENGINE, OLD, NOW, REF = -1.2, -1.0, -0.7, -1.9
"""Log-probabilities of one token under the engine, and under the policies before the update, now
and of the reference."""
ENTROPY, ADVANTAGE = 0.4, 2.0


def k3(policy: float, other: float) -> float:
    """Divergence of `policy` from `other` on a token that `policy` drew."""
    return math.exp(other - policy) - 1 - (other - policy)


def of(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


def batch() -> MicroBatch:
    zeros = torch.zeros(1, dtype=torch.int64)
    return MicroBatch(
        input_ids=zeros,
        position_ids=zeros,
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        max_seqlen=1,
        predict_index=zeros,
        labels=zeros,
        sequence_index=zeros,
        unit_index=zeros,
        num_units=1,
        weights=of(1.0),
        ids=("a",),
        lengths=(1,),
        columns={
            "advantages": of(ADVANTAGE),
            "logprobs/engine": of(ENGINE),
            "logprobs/policy": of(OLD),
            "logprobs/reference": of(REF),
        },
    )


def objective(cfg: dict[str, Any]) -> tuple[float, dict[str, float]]:
    found = policy_objective(of(NOW), of(ENTROPY), batch(), AlgorithmConfig.model_validate(cfg))
    return float(found.values), {name: float(v) for name, v in found.token_metrics.items()}


WIDE = {"clip_low": 0.9, "clip_high": 9.0}
METRICS = {
    "policy/clip_fraction": 0.0,
    "policy/approx_kl": k3(OLD, NOW),
    "policy/ratio/mean": math.exp(NOW - OLD),
    "off_policy/kl": k3(ENGINE, OLD),
    "policy/ref_kl": k3(NOW, REF),
    "policy/ref_kl_k1": NOW - REF,
    "policy/entropy": ENTROPY,
}


def test_each_metric_is_of_the_policies_that_it_names() -> None:
    """No two are each other's mirror image: every divergence is of its first from its second."""
    _, metrics = objective(WIDE)
    assert metrics == pytest.approx(METRICS)
    mirrored = [k3(NOW, OLD), k3(OLD, ENGINE), k3(REF, NOW)]
    assert not any(value == pytest.approx(m) for value in metrics.values() for m in mirrored)


MASKS: list[tuple[dict[str, Any], bool]] = [
    ({}, False),
    ({"clip_high": 0.2}, True),
    ({"correction": {"kind": "tis", "high": 1.1}}, False),
    ({"correction": {"kind": "icepop", "high": 1.1}}, True),
    ({"correction": {"kind": "icepop", "high": 1.3}}, False),
]


@table("cfg, is_masked", MASKS)
@table("advantage", [2.0, -2.0])
def test_tokens_are_masked_by_clipping_and_correction(
    monkeypatch: pytest.MonkeyPatch, cfg: dict[str, Any], is_masked: bool, advantage: float
) -> None:
    """Clipping from above holds back tokens of positive advantage alone."""
    monkeypatch.setattr(f"{__name__}.ADVANTAGE", advantage)
    objective = PolicyObjective(AlgorithmConfig.model_validate(WIDE | cfg), max_completion_tokens=1)
    outputs: Outputs = {"logprobs": of(NOW), "entropy": of(ENTROPY)}
    scalars = to_scalars(objective(outputs, batch()).metrics)
    sign, other = ("positive", "negative") if advantage > 0 else ("negative", "positive")
    expected = is_masked and not ("clip_high" in cfg and advantage < 0)
    assert scalars[f"policy/masked_share/{sign}"] == expected
    assert f"policy/masked_share/{other}" not in scalars, "there is no token of this sign"


SURROGATE, WEIGHT = -ADVANTAGE * math.exp(NOW - OLD), math.exp(OLD - ENGINE)
VALUES: list[tuple[dict[str, Any], float]] = [
    ({}, SURROGATE),
    ({"correction": {"kind": "tis", "high": 5.0}}, WEIGHT * SURROGATE),
    ({"kl": {"coef": 0.5, "placement": "loss"}}, SURROGATE + 0.5 * k3(NOW, REF)),
    ({"kl": {"coef": 0.5, "placement": "reward", "estimator": "k1"}}, SURROGATE),
    ({"entropy_coef": 0.1}, SURROGATE - 0.1 * ENTROPY),
    # The correction weighs the loss alone: reference and entropy are of the present policy.
    (
        {
            "correction": {"kind": "tis", "high": 5.0},
            "kl": {"coef": 0.5, "placement": "loss"},
            "entropy_coef": 0.1,
        },
        WEIGHT * SURROGATE + 0.5 * k3(NOW, REF) - 0.1 * ENTROPY,
    ),
]


@table("cfg, expected", VALUES)
def test_the_objective_adds_up(cfg: dict[str, Any], expected: float) -> None:
    value, _ = objective(WIDE | cfg)
    assert value == pytest.approx(expected)


def test_the_policy_stands_in_for_its_old_self_without_gradient() -> None:
    """Its ratio is 1, and the gradient that of REINFORCE: a ratio of itself would have none."""
    logprobs = of(NOW).requires_grad_()
    without = batch()
    del without.columns["logprobs/policy"], without.columns["logprobs/reference"]
    terms = policy_objective(logprobs, of(ENTROPY), without, AlgorithmConfig())
    (gradient,) = torch.autograd.grad(terms.values.sum(), logprobs)
    assert float(terms.values.detach()) == -ADVANTAGE
    assert float(gradient) == -ADVANTAGE
