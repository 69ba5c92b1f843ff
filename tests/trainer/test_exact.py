"""The trainer in exact mode, with torch in place of the kernels: values, gradients, reference."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from hone.algorithms.objective import PolicyObjective
from hone.algorithms.settings import AlgorithmConfig
from hone.errors import UserError
from hone.models import token_logprobs as scoring
from hone.models.decoder import head_weight
from hone.trainer.frozen import FrozenScorer
from hone.trainer.logprobs import token_logprobs
from hone.trainer.settings import TrainerConfig
from hone.trainer.trainer import Trainer
from tests.models.exact_fakes import use_torch
from tests.trainer.examples import VOCAB, gradients, logprobs_of, random_rows, tiny_model

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="triton cannot be imported")


def make_trainer(model, *, exact=True, **settings):
    return Trainer(
        model,
        TrainerConfig.model_validate(settings),
        PolicyObjective(AlgorithmConfig(), max_completion_tokens=24),
        temperature=0.7,
        total_steps=100,
        exact=exact,
    )


@pytest.fixture
def products(monkeypatch):
    return use_torch(monkeypatch)


@pytest.mark.parametrize("recompute", ["off", "full"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_update_is_that_of_the_ordinary_trainer(products, family, recompute):
    rows = random_rows(9)
    expected = make_trainer(tiny_model(family), exact=False)
    wanted_loss, _ = expected.forward_backward(rows)
    actual = make_trainer(tiny_model(family), recompute=recompute)
    assert not products
    loss, _ = actual.forward_backward(rows)
    assert products
    torch.testing.assert_close(loss, wanted_loss)
    torch.testing.assert_close(gradients(actual), gradients(expected), rtol=1e-3, atol=1e-6)


def test_bfloat16_gradients_reach_the_masters(products):
    model = tiny_model(dtype=torch.bfloat16)
    trainer = make_trainer(model)
    trainer.forward_backward(random_rows(5))
    assert {g.dtype for g in trainer.policy.gradients.values()} == {torch.float32}
    assert all(p.grad is None for p in model.parameters())


def test_values_come_from_the_sampling_kernel_and_gradients_do_not(products, monkeypatch):
    monkeypatch.setattr(scoring, "token_logprobs", lambda logits, ids, temperatures: -temperatures)
    model = tiny_model()
    hidden = torch.randn(7, 32).requires_grad_()
    labels = torch.randint(VOCAB, (7,))
    options = {"temperature": 0.7, "chunk_tokens": 3, "with_entropy": True}
    exact, entropy = token_logprobs(model, hidden, labels, **options, exact=True)
    plain, expected_entropy = token_logprobs(model, hidden, labels, **options)
    assert torch.equal(exact, torch.full((7,), -0.7))
    torch.testing.assert_close(entropy, expected_entropy)
    inputs = [hidden, head_weight(model)]
    # Up to the value itself, of which the probability of the label is taken.
    ours, theirs = (torch.autograd.grad(x.sum(), inputs, retain_graph=True) for x in (exact, plain))
    assert all(a.shape == b.shape and a.isfinite().all() for a, b in zip(ours, theirs, strict=True))


def test_reference_is_scored_exactly_too(products):
    trainer = make_trainer(tiny_model())
    scorer = FrozenScorer(tiny_model(), TrainerConfig(), temperature=0.7, exact=True)
    rows = random_rows(4)
    pairs = zip(trainer.logprobs(rows), logprobs_of(scorer, rows), strict=True)
    assert all(torch.equal(policy, reference) for policy, reference in pairs)
    products.clear()
    logprobs_of(scorer, rows)
    assert products


def test_cpu_is_refused():
    with pytest.raises(UserError, match=r"model\.exact: .*got cpu"):
        make_trainer(tiny_model())
