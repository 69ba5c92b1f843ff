"""What `hone rl --help` says of the learning rule, against plain Python in double precision."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from hone.algorithms.advantages import ADVANTAGES, ScoredSample
from hone.algorithms.aggregation import AGGREGATIONS
from hone.algorithms.objective import policy_objective
from hone.config.algorithm import AlgorithmConfig
from hone.types import MicroBatch

SEQUENCES = [0, 0, 0, 1, 1]
"""The sequence of each of five trained tokens."""
CURRENT = [-1.0, -0.7, -2.1, -0.4, -1.6]
OLD = [-1.2, -0.6, -1.9, -0.5, -1.3]
ENGINE = [-0.6, -0.7, -3.1, -0.6, -1.2]
ENTROPY = [0.9, 0.3, 1.4, 0.2, 1.1]
ADVANTAGE = [0.8, -1.3]


def batch(weights: list[float]) -> MicroBatch:
    num = len(SEQUENCES)
    return MicroBatch(
        input_ids=torch.zeros(num, dtype=torch.int64),
        position_ids=torch.arange(num),
        cu_seqlens=torch.tensor([0, 3, 5], dtype=torch.int32),
        max_seqlen=3,
        predict_index=torch.arange(num),
        labels=torch.zeros(num, dtype=torch.int64),
        sequence_index=torch.tensor(SEQUENCES),
        weights=torch.tensor(weights),
        advantages=torch.tensor([ADVANTAGE[s] for s in SEQUENCES]),
        rollout_logprobs=torch.tensor(ENGINE),
        old_logprobs=torch.tensor(OLD),
        ids=("a", "b"),
    )


def gspo_terms(low: float, high: float) -> list[float]:
    """Minus the clipped surrogate of each token, whose ratio is its sequence's geometric mean."""
    terms: list[float] = []
    for sequence in SEQUENCES:
        own = [i for i, other in enumerate(SEQUENCES) if other == sequence]
        ratio = math.exp(statistics.fmean(CURRENT[i] - OLD[i] for i in own))
        clipped = min(max(ratio, 1 - low), 1 + high)
        advantage = ADVANTAGE[sequence]
        terms.append(-min(ratio * advantage, clipped * advantage))
    return terms


def factor(kind: str, token: int, low: float, high: float) -> float:
    ratio = math.exp(OLD[token] - ENGINE[token])
    own = [i for i, other in enumerate(SEQUENCES) if other == SEQUENCES[token]]
    mean = math.exp(statistics.fmean(OLD[i] - ENGINE[i] for i in own))
    return {
        "none": 1.0,
        "tis": min(ratio, high),
        "icepop": ratio if low <= ratio <= high else 0.0,
        "sequence_mask": float(low <= mean <= high),
    }[kind]


@pytest.mark.parametrize("kind", ["none", "tis", "icepop", "sequence_mask"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_gspo_with_corrections_of_tokens_and_an_entropy_bonus(kind: str, aggregation: str) -> None:
    """Each token's factor weights its own term, and its entropy not; both are averaged alike."""
    low, high, coef = 0.7, 1.3, 0.05
    cfg = AlgorithmConfig.model_validate(
        {
            "loss": "gspo",
            "clip_low": 0.02,
            "clip_high": 0.02,
            "aggregation": aggregation,
            "entropy_coef": coef,
            "correction": {"kind": kind, "low": low, "high": high},
        }
    )
    weight = [0.2] * 5 if aggregation == "token_mean" else [1 / 6, 1 / 6, 1 / 6, 1 / 4, 1 / 4]
    computed = AGGREGATIONS[aggregation]([3, 2], 9)
    assert [computed[s] for s in SEQUENCES] == pytest.approx(weight)
    found = policy_objective(torch.tensor(CURRENT), torch.tensor(ENTROPY), batch(weight), cfg)
    loss = float((found.values.double() * torch.tensor(weight).double()).sum())
    terms = gspo_terms(0.02, 0.02)
    expected = math.fsum(
        weight[i] * (factor(kind, i, low, high) * terms[i] - coef * ENTROPY[i]) for i in range(5)
    )
    assert loss == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_sequences_without_a_trained_token_do_not_count() -> None:
    """Three sequences of 4, 0 and 2 trained tokens are two."""
    assert AGGREGATIONS["sequence_mean"]([4, 0, 2], 8) == [1 / 8, 0.0, 1 / 4]
    assert AGGREGATIONS["constant"]([4, 0, 2], 8) == [1 / 16, 0.0, 1 / 16]
    assert AGGREGATIONS["token_mean"]([4, 0, 2], 8) == [1 / 6, 0.0, 1 / 6]


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_pp", "reinforce_pp_baseline"])
def test_standard_deviations_divide_by_n_less_one(estimator: str) -> None:
    rewards, lengths = [[1.0, 0.0, 0.0, 0.5], [2.0, 1.0]], [[1, 2, 3, 1], [2, 2]]
    groups = [
        [ScoredSample(reward, torch.zeros(n)) for reward, n in zip(*group, strict=True)]
        for group in zip(rewards, lengths, strict=True)
    ]
    centred = [[reward - statistics.fmean(group) for reward in group] for group in rewards]
    per_sample = rewards if estimator == "reinforce_pp" else centred
    if estimator == "grpo":
        expected = [
            [value / (statistics.stdev(group) + 1e-6) for value in of]
            for group, of in zip(rewards, centred, strict=True)
        ]
    else:
        flat = [
            value
            for of, ns in zip(per_sample, lengths, strict=True)
            for value, n in zip(of, ns, strict=True)
            for _ in range(n)
        ]
        mean, std = statistics.fmean(flat), statistics.stdev(flat)
        expected = [[(value - mean) / (std + 1e-6) for value in of] for of in per_sample]
    for found, wanted in zip(ADVANTAGES[estimator](groups), expected, strict=True):
        for tokens, value in zip(found, wanted, strict=True):
            assert tokens.tolist() == pytest.approx([value] * len(tokens), rel=1e-6, abs=1e-7)
