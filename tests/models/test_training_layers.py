"""The trainer's layers in Triton's interpreter, against transformers' own modules in float64."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from hone.attention import PackedContext
from hone.models.training_layers import has_training_layers, training_backbone
from tests.interpreted import run_interpreted
from tests.models.training_cases import BUGS, CASES
from tests.trainer.examples import tiny_model

needs_triton = pytest.mark.skipif(not find_spec("triton"), reason="triton cannot be imported")


@pytest.fixture(scope="module")
def results():
    return run_interpreted("tests.models.interpreted_training_layers")


@needs_triton
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_every_parameter_are_those_of_the_model(results, case):
    assert len(results[case]) > 15
    wrong = {name: error for name, error in results[case].items() if not error < 1e-5}
    assert not wrong


@needs_triton
@pytest.mark.parametrize("bug", BUGS)
def test_wrong_layers_are_found(results, bug):
    assert results["bugs"][bug] > 1e-2


@needs_triton
def test_gradients_are_collected_where_told(results):
    assert results["collected elsewhere"]


@needs_triton
def test_scoring_has_the_bits_of_training(results):
    assert results["scored"]


def test_cpu_keeps_the_modules_of_transformers():
    model = tiny_model()
    assert not has_training_layers(model)
    ids, positions = torch.arange(6), torch.tensor([0, 1, 2, 0, 1, 2])
    context = PackedContext.from_lengths((3, 3))
    hidden = training_backbone(model, recompute="full")(ids, positions, context)
    hidden.sum().backward()
    assert all(p.grad is not None for p in model.base_model.parameters())
