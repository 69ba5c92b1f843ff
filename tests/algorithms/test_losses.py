"""Losses, corrections and aggregations against loops in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import pytest
import torch

from hone.algorithms.aggregation import AGGREGATIONS, Aggregation
from hone.algorithms.corrections import CORRECTIONS, CorrectionKind
from hone.algorithms.losses import LOSSES, LossInputs, LossName
from hone.algorithms.settings import AlgorithmConfig
from tests.tables import table

LENGTHS = [1, 5, 2, 9]


def random_inputs(seed: int, *, spread: float = 0.5) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)
    n = sum(LENGTHS)
    old = -torch.rand(n, generator=generator, dtype=torch.float64) * 3
    logprobs = old + spread * torch.randn(n, generator=generator, dtype=torch.float64)
    advantages = torch.randn(n, generator=generator, dtype=torch.float64)
    index = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    return LossInputs(
        logprobs=logprobs.requires_grad_(),
        old_logprobs=old,
        advantages=advantages,
        sequence_index=index,
        num_sequences=len(LENGTHS),
    )


def by_hand(name: str, inputs: LossInputs, cfg: AlgorithmConfig) -> tuple[list[float], list[float]]:
    """Values and d(sum of values) / d(logprob), token by token."""
    lp, old, adv = (x.tolist() for x in (inputs.logprobs, inputs.old_logprobs, inputs.advantages))
    seq = inputs.sequence_index.tolist()
    values, grads = [], [0.0] * len(lp)
    members = {s: [t for t, owner in enumerate(seq) if owner == s] for s in set(seq)}
    low, high = 1 - cfg.clip_low, 1 + cfg.clip_high
    for t in range(len(lp)):
        if name == "gmpo":
            tokens = members[seq[t]]
            ratios = {i: math.exp(lp[i] - old[i]) for i in tokens}
            cut = {i: min(r, high) if adv[i] > 0 else max(r, low) for i, r in ratios.items()}
            mean = math.prod(cut.values()) ** (1 / len(tokens))
            values.append(-mean * adv[t])
            for i in tokens:
                grads[i] -= mean * adv[t] / len(tokens) if cut[i] == ratios[i] else 0.0
            continue
        if name == "gspo":
            tokens = members[seq[t]]
            ratio = math.exp(sum(lp[i] - old[i] for i in tokens) / len(tokens))
        else:
            tokens = [t]
            ratio = math.exp(lp[t] - old[t])
        clipped = min(max(ratio, low), high)
        if name == "cispo":
            values.append(-clipped * adv[t] * lp[t])
            grads[t] += -clipped * adv[t]
            continue
        if name == "sapo":
            tau = 1.0 if adv[t] > 0 else 1.05
            gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
            values.append(-4 / tau * gate * adv[t])
            grads[t] += -4 * gate * (1 - gate) * ratio * adv[t]
            continue
        value, slope = -ratio * adv[t], -ratio * adv[t]
        if -clipped * adv[t] > value:
            value, slope = -clipped * adv[t], 0.0
        if name == "ppo_clip" and cfg.dual_clip and adv[t] < 0 and value > -cfg.dual_clip * adv[t]:
            value, slope = -cfg.dual_clip * adv[t], 0.0
        values.append(value)
        for i in tokens:
            grads[i] += slope / len(tokens)
    return values, grads


@table("name", get_args(LossName))
@table(
    "options",
    [
        {},
        {"clip_low": 0.1, "clip_high": 0.3},
        {"dual_clip": 1.5},
        {"clip_low": 3e-2},
        {"clip_low": 1.0},
    ],
)
def test_loss_equals_its_equation(name: LossName, options: dict[str, float]) -> None:
    cfg = AlgorithmConfig.model_validate({"loss": name, **options})
    for seed in range(10):
        inputs = random_inputs(seed)
        terms = LOSSES[name](inputs, cfg)
        (grad,) = torch.autograd.grad(terms.values.sum(), inputs.logprobs)
        values, grads = by_hand(name, inputs, cfg)
        assert terms.values.tolist() == pytest.approx(values, abs=1e-12)
        assert grad.tolist() == pytest.approx(grads, abs=1e-12)


@table("name", get_args(LossName))
def test_on_policy_gradient_is_reinforce(name: LossName) -> None:
    inputs = random_inputs(1, spread=0.0)
    terms = LOSSES[name](inputs, AlgorithmConfig())
    (grad,) = torch.autograd.grad(terms.values.sum(), inputs.logprobs)
    if name in ("gmpo", "gspo"):  # every token of a sequence shares its mean advantage
        expected = torch.cat([-a.mean().expand(len(a)) for a in inputs.advantages.split(LENGTHS)])
    else:
        expected = -inputs.advantages
    torch.testing.assert_close(grad, expected)
    assert not terms.clipped.any()


def test_a_token_that_gmpo_cuts_loses_its_own_gradient_alone() -> None:
    inputs = random_inputs(3)
    terms = LOSSES["gmpo"](inputs, AlgorithmConfig())
    (grad,) = torch.autograd.grad(terms.values.sum(), inputs.logprobs)
    assert terms.clipped.tolist() == (grad == 0).tolist()
    assert any(0 < int(cut.sum()) < len(cut) for cut in terms.clipped.split(LENGTHS))


@table("name", get_args(LossName))
def test_huge_log_ratio_stays_finite(name: LossName) -> None:
    inputs = random_inputs(2, spread=1e4)
    values = LOSSES[name](inputs, AlgorithmConfig()).values
    (grad,) = torch.autograd.grad(values.sum(), inputs.logprobs)
    assert torch.isfinite(values).all()
    assert torch.isfinite(grad).all()


def correction_by_hand(
    kind: str, log_ratio: list[float], low: float, high: float, lengths: Sequence[int] = LENGTHS
) -> list[float]:
    out, start = [], 0
    for n in lengths:
        tokens = log_ratio[start : start + n]
        start += n
        mean = math.exp(sum(tokens) / n)
        for value in tokens:
            w = math.exp(value)
            out.append(
                {
                    "none": 1.0,
                    "tis": min(w, high),
                    "icepop": w if low <= w <= high else 0.0,
                    "sequence_mask": 1.0 if low <= mean <= high else 0.0,
                }[kind]
            )
    return out


@table("kind", get_args(CorrectionKind))
def test_correction_equals_its_equation(kind: CorrectionKind) -> None:
    for seed in range(10):
        inputs = random_inputs(seed, spread=0.8)
        log_ratio = (inputs.logprobs - inputs.old_logprobs).detach()
        factors = CORRECTIONS[kind](log_ratio, inputs.sequence_index, len(LENGTHS), 0.7, 1.4)
        expected = correction_by_hand(kind, log_ratio.tolist(), 0.7, 1.4)
        assert factors.tolist() == pytest.approx(expected, abs=1e-12)


@table("kind", ["icepop", "sequence_mask"])
@table("low, high", [(1.0, 1.4), (0.7, 1.0)])
def test_tokens_at_a_bound_are_kept(kind: CorrectionKind, low: float, high: float) -> None:
    """As all are where engine and trainer agree to the bit."""
    index = torch.tensor([0, 0, 1])
    factors = CORRECTIONS[kind](torch.zeros(3), index, 2, low, high)
    assert factors.tolist() == [1.0] * 3


def aggregate(name: Aggregation, losses: list[list[float]], limit: int = 10) -> float:
    weights = AGGREGATIONS[name]([len(x) for x in losses], limit)
    return sum(w * sum(x) for w, x in zip(weights, losses, strict=True))


def test_R1_closed_forms() -> None:
    """Losses 1 over one token and 9 over three tokens."""
    losses = [[1.0], [3.0, 3.0, 3.0]]
    assert aggregate("token_mean", losses) == pytest.approx(2.5)
    assert aggregate("sequence_mean", losses) == pytest.approx(2.0)
    assert aggregate("constant", losses, limit=10) == pytest.approx(10 / 20)


@table("name", get_args(Aggregation))
def test_sequences_without_trained_tokens_count_for_nothing(name: Aggregation) -> None:
    assert aggregate(name, [[1.0], [], [9.0, 0.0, 0.0], []]) == pytest.approx(
        aggregate(name, [[1.0], [9.0, 0.0, 0.0]])
    )
    assert AGGREGATIONS[name]([0, 0], 10) == [0.0, 0.0]
