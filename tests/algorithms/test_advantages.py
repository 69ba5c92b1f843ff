"""Advantage estimators against brute force over the valid set."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from typing import get_args

import pytest
import torch

from hone.algorithms.advantages import ADVANTAGES, EstimatorName, ScoredSample, has_spread
from tests.tables import table

Case = list[list[tuple[float, list[float]]]]
"""Groups of (reward, penalty of each token)."""


def random_case(seed: int, *, with_penalties: bool) -> Case:
    rng = random.Random(seed)
    return [
        [
            (
                rng.choice([0.0, 1.0, rng.uniform(-2, 2)]),
                [
                    rng.uniform(-0.1, 0.1) if with_penalties else 0.0
                    for _ in range(rng.randint(1, 7))
                ],
            )
            for _ in range(rng.randint(2, 6))
        ]
        for _ in range(rng.randint(1, 5))
    ]


def run(name: EstimatorName, case: Case) -> list[list[list[float]]]:
    groups = [
        [ScoredSample(r, torch.tensor(p, dtype=torch.float64)) for r, p in group] for group in case
    ]
    return [[a.tolist() for a in group] for group in ADVANTAGES[name].estimate(groups)]


def brute_grpo(case: Case) -> list[list[list[float]]]:
    out = []
    for group in case:
        scores = [r - math.fsum(p) for r, p in group]
        mean, std = statistics.fmean(scores), statistics.stdev(scores)
        out.append(
            [[(s - mean) / (std + 1e-6)] * len(p) for s, (_, p) in zip(scores, group, strict=True)]
        )
    return out


def brute_dr_grpo(case: Case) -> list[list[list[float]]]:
    out = []
    for group in case:
        scores = [r - math.fsum(p) for r, p in group]
        mean = statistics.fmean(scores)
        out.append([[s - mean] * len(p) for s, (_, p) in zip(scores, group, strict=True)])
    return out


def brute_rloo(case: Case) -> list[list[list[float]]]:
    out = []
    for group in case:
        scores = [r - math.fsum(p) for r, p in group]
        out.append(
            [
                [s - statistics.fmean(scores[:i] + scores[i + 1 :])] * len(group[i][1])
                for i, s in enumerate(scores)
            ]
        )
    return out


def brute_whitened(case: Case, baseline: bool) -> list[list[list[float]]]:
    returns = []
    for group in case:
        mean = statistics.fmean(r for r, _ in group) if baseline else 0.0
        returns.append([[r - mean - math.fsum(p[t:]) for t in range(len(p))] for r, p in group])
    flat = [x for group in returns for tokens in group for x in tokens]
    mean = statistics.fmean(flat)
    std = statistics.stdev(flat) if len(flat) > 1 else 0.0
    return [[[(x - mean) / (std + 1e-6) for x in tokens] for tokens in g] for g in returns]


BRUTE: dict[str, Callable[[Case], list[list[list[float]]]]] = {
    "grpo": brute_grpo,
    "dr_grpo": brute_dr_grpo,
    "rloo": brute_rloo,
    "reinforce_pp": lambda case: brute_whitened(case, baseline=False),
    "reinforce_pp_baseline": lambda case: brute_whitened(case, baseline=True),
}


def check(name: EstimatorName, case: Case, actual: list[list[list[float]]]) -> None:
    for group, expected in zip(actual, BRUTE[name](case), strict=True):
        for tokens, wanted in zip(group, expected, strict=True):
            assert tokens == pytest.approx(wanted, abs=2e-5, rel=1e-5)


def spreads(case: Case) -> bool:
    return all(has_spread([r - math.fsum(p) for r, p in group]) for group in case) and all(
        has_spread([r for r, _ in group]) for group in case
    )


@table("name", get_args(EstimatorName))
@table("with_penalties", [False, True])
def test_R21_equals_brute_force(name: EstimatorName, with_penalties: bool) -> None:
    checked = 0
    for seed in range(60):
        case = random_case(seed, with_penalties=with_penalties)
        if spreads(case):
            check(name, case, run(name, case))
            checked += 1
    assert checked > 10


@table("name", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
def test_R21_planted_baseline_over_the_wrong_set_is_caught(name: EstimatorName) -> None:
    """A failed sample that stays in the baseline as reward 0 must change the advantages."""
    case = [[(1.0, [0.0, 0.0]), (0.5, [0.0]), (2.0, [0.0])], [(0.0, [0.0]), (1.0, [0.0])]]
    poisoned = [[*case[0], (0.0, [0.0])], case[1]]
    wrong = run(name, poisoned)
    wrong[0] = wrong[0][:3]
    with pytest.raises(AssertionError):
        check(name, case, wrong)


@table("name", get_args(EstimatorName))
def test_constant_rewards_give_exactly_zero(name: EstimatorName) -> None:
    """0.1 summed in another order differs by rounding; that is not a signal (R23)."""
    noisy = [0.1 * 3, 0.1 + 0.1 + 0.1, 0.3, 0.30000000000000004, 0.3, 0.3, 0.3, 0.3]
    case = [[(r, [0.0] * 3) for r in noisy]]
    assert all(x == 0.0 for group in run(name, case) for tokens in group for x in tokens)


@table(
    "rewards, spreads",
    [
        ([0.3, 0.1 + 0.1 + 0.1], False),
        ([1.0, 1 + 0.9e-7], False),
        ([1.0, 1 + 2e-7], True),
        ([1.0, 1.0001], True),
        ([1000.0, 1000.1], True),
        ([-1000.0, -1000 + 0.9e-4], False),  # of the larger, whatever its sign
        ([0.0, 0.9e-7], False),  # below 1, of 1
        ([0.0, 2e-7], True),
    ],
)
def test_rewards_that_differ_by_more_than_rounding_are_a_signal(
    rewards: list[float], spreads: bool
) -> None:
    """Estimators that compare within a group give exactly 0 without it."""
    assert has_spread(rewards) == has_spread(rewards[::-1]) == spreads
    names: list[EstimatorName] = ["grpo", "dr_grpo", "rloo"]
    for name in names:
        ((first, second),) = run(name, [[(reward, [0.0]) for reward in rewards]])
        assert (first[0] < 0 < second[0]) if spreads else (first[0] == second[0] == 0)


@table("name", ["grpo", "dr_grpo", "rloo"])
def test_order_of_samples_does_not_matter(name: EstimatorName) -> None:
    case = random_case(3, with_penalties=True)
    shuffled = [list(reversed(group)) for group in case]
    for a, b in zip(run(name, case), run(name, shuffled), strict=True):
        for x, y in zip(a, reversed(b), strict=True):
            assert x == pytest.approx(y, abs=1e-7)
