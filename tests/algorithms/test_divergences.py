"""Divergences of two distributions against their definition, in float64."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hone.algorithms.divergences import DIVERGENCES
from tests.tables import table

VOCABULARY = 9


def logits(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(4, VOCABULARY, generator=generator, dtype=torch.float64)


def kl(left: list[float], right: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(left, right, strict=True) if a)


def by_hand(name: str, p: list[float], q: list[float]) -> float:
    if name == "js":
        mean = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
        return (kl(p, mean) + kl(q, mean)) / 2
    return kl(p, q) if name == "reverse_kl" else kl(q, p)


@table("name", DIVERGENCES)
@table("num_words", [1, 3, VOCABULARY])
def test_they_are_those_of_the_likeliest_words_and_the_rest(name: str, num_words: int) -> None:
    policy, teacher = (logits(seed).log_softmax(-1) for seed in (0, 1))
    top = teacher.topk(num_words)
    found = DIVERGENCES[name](policy.gather(-1, top.indices), top.values)
    for own, others, ids, value in zip(policy, teacher, top.indices, found, strict=True):
        p, q = ([float(x[i].exp()) for i in ids] for x in (own, others))
        if num_words < VOCABULARY:
            p, q = [*p, 1 - sum(p)], [*q, 1 - sum(q)]
        assert float(value) == pytest.approx(by_hand(name, p, q), abs=1e-9)


@table("name", DIVERGENCES)
def test_fewer_words_tell_less_apart(name: str) -> None:
    policy, teacher = (logits(seed).log_softmax(-1) for seed in (2, 3))
    found = []
    for num_words in range(1, VOCABULARY + 1):
        top = teacher.topk(num_words)
        found.append(DIVERGENCES[name](policy.gather(-1, top.indices), top.values))
    for fewer, more in pairwise(found):
        assert bool((fewer <= more + 1e-9).all())


@table("name", DIVERGENCES)
@table("mass", [1e-2, 1e-4, 1e-5])
def test_a_small_rest_counts_for_what_it_is(name: str, mass: float) -> None:
    """Of a sure teacher: the policy leaves ten times as much to the other words, or a tenth."""
    for rest in (10 * mass, mass / 10):
        p, q = [1 - rest, rest], [1 - mass, mass]
        policy, teacher = (torch.tensor([[x[0]]], dtype=torch.float64).log() for x in (p, q))
        value = float(DIVERGENCES[name](policy, teacher))
        assert value == pytest.approx(by_hand(name, p, q), rel=1e-6, abs=1e-15)


@table("name", DIVERGENCES)
@table("num_words", [2, VOCABULARY])
def test_their_gradients_are_those_of_finite_differences(name: str, num_words: int) -> None:
    teacher = logits(4).log_softmax(-1).topk(num_words)

    def loss(own: Tensor) -> Tensor:
        return DIVERGENCES[name](own.log_softmax(-1).gather(-1, teacher.indices), teacher.values)

    assert torch.autograd.gradcheck(loss, logits(5).requires_grad_())


@table("name", DIVERGENCES)
def test_equal_distributions_and_certainty_are_no_trouble(name: str) -> None:
    """Where the words' mass is 1 as far as float32 can tell, and where it is not of the other."""
    sure = torch.tensor([[60.0, 0.0, 0.0], [0.0, 60.0, 0.0]]).log_softmax(-1)
    own = torch.zeros(2, 3).requires_grad_()
    for teacher in (sure[:, :1], sure[:, 1:], sure):
        value = DIVERGENCES[name](own.log_softmax(-1)[:, : teacher.shape[-1]], teacher)
        (gradient,) = torch.autograd.grad(value.sum(), own)
        assert value.isfinite().all()
        assert gradient.isfinite().all()
        same = DIVERGENCES[name](teacher, teacher)
        assert same.abs().max() < 1e-6
