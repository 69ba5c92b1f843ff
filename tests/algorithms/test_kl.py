"""KL estimators against the exact divergence over a five-token vocabulary."""

from __future__ import annotations

import pytest
import torch

from hone.algorithms.kl import KL_ESTIMATORS, k1, k2, k3

NUM_SAMPLES = 400_000


def policies(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, generator=generator, dtype=torch.float64)
    reference = torch.randn(5, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), reference


def exact_reverse_kl(logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    logp, logq = logits.log_softmax(-1), reference.log_softmax(-1)
    return (logp.exp() * (logp - logq)).sum()


def sampled(
    estimator: str, logits: torch.Tensor, reference: torch.Tensor, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-sample values [M] and per-sample gradients [M, 5] for tokens drawn from the policy."""
    logp, logq = logits.log_softmax(-1).detach(), reference.log_softmax(-1)
    tokens = torch.multinomial(
        logp.exp(), NUM_SAMPLES, True, generator=torch.Generator().manual_seed(seed)
    )
    token_logp = logp[tokens].requires_grad_()
    values = KL_ESTIMATORS[estimator](token_logp, logq[tokens])
    (slope,) = torch.autograd.grad(values.sum(), token_logp)
    score = torch.nn.functional.one_hot(tokens, 5).double() - logp.exp()
    return values.detach(), slope[:, None] * score


def within_three_errors(samples: torch.Tensor, expected: torch.Tensor) -> bool:
    error = samples.std(0) / NUM_SAMPLES**0.5
    return bool(((samples.mean(0) - expected).abs() <= 3.5 * error + 1e-12).all())


@pytest.mark.parametrize("seed", range(3))
def test_values_are_unbiased_where_they_claim_to_be(seed: int) -> None:
    logits, reference = policies(seed)
    exact = exact_reverse_kl(logits, reference).detach()
    for name in ("k1", "k3"):
        values, _ = sampled(name, logits, reference, seed)
        assert within_three_errors(values[:, None], exact[None]), name
    values, _ = sampled("k2", logits, reference, seed)
    assert not within_three_errors(values[:, None], exact[None]), "k2 is biased in value"


@pytest.mark.parametrize("seed", range(3))
def test_R23_k2_has_the_gradient_of_the_reverse_kl(seed: int) -> None:
    logits, reference = policies(seed)
    (exact,) = torch.autograd.grad(exact_reverse_kl(logits, reference), logits)
    _, grads = sampled("k2", logits, reference, seed)
    assert within_three_errors(grads, exact)
    # k1 in the loss pulls nowhere, and k3 somewhere else: the planted confusions.
    _, grads = sampled("k1", logits, reference, seed)
    assert within_three_errors(grads, torch.zeros_like(exact))
    assert not within_three_errors(grads, exact)
    _, grads = sampled("k3", logits, reference, seed)
    assert not within_three_errors(grads, exact)


def test_R23_one_step_lowers_the_divergence() -> None:
    logits, reference = policies(7)
    before = exact_reverse_kl(logits, reference)
    _, grads = sampled("k2", logits, reference, 0)
    after = exact_reverse_kl(logits.detach() - 0.05 * grads.mean(0), reference)
    ascended = exact_reverse_kl(logits.detach() + 0.05 * grads.mean(0), reference)
    assert after < before < ascended


def test_shapes_of_the_estimators() -> None:
    p, q = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    torch.testing.assert_close(k1(p, q), torch.tensor([0.5, -1.0]))
    torch.testing.assert_close(k2(p, q), torch.tensor([0.125, 0.5]))
    expected = torch.tensor([0.5, -1.0]) + torch.exp(torch.tensor([-0.5, 1.0])) - 1
    torch.testing.assert_close(k3(p, q), expected)
    assert (k3(p, q) >= 0).all()
    assert torch.isfinite(k3(torch.tensor([0.0]), torch.tensor([1e6]))).all()
