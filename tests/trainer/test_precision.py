"""Products in float8 against their definition in float64, and models that train with them.

torchao computes them; without it (the extra `fp8`) only what is refused is tested.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

from hone.errors import UserError
from hone.models.decoder import alias_module, decoder_layers
from hone.models.manifest import export_weights
from hone.trainer import precision
from hone.trainer.precision import (
    apply_matmul_precision,
    multiply_in_float8,
    require_matmul_precision,
)
from tests.tables import table
from tests.trainer import float8_twin
from tests.trainer.examples import (
    gradients,
    logprobs_of,
    make_reference,
    make_trainer,
    near_policy,
    random_rows,
    tiny_model,
)
from tests.trainer.float8_twin import e4m3

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
GRADIENT_ERROR = 0.25
"""Relative, of any parameter of two layers; one product alone is off by 0.04."""


@pytest.fixture
def float8(monkeypatch):
    """Float8 products on a CPU."""
    monkeypatch.syspath_prepend(Path(sys.prefix) / "fp8")  # where `make test` has put torchao
    pytest.importorskip("torchao", reason="the extra fp8 is not installed")
    monkeypatch.setattr(torch, "_scaled_mm", float8_twin.scaled_mm)
    monkeypatch.setattr(precision, "require_matmul_precision", lambda *_: None)


def wide_model(**fields):
    shape = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    return tiny_model(dtype=torch.bfloat16, initializer_range=0.02, **shape | fields)


# ---------------------------------------------------------------- the definition


def test_e4m3_is_torchs_format():
    x = torch.cat([torch.linspace(-500, 500, 4001), torch.linspace(-0.04, 0.04, 4001)]).double()
    expected = x.float().clamp(-448, 448).to(torch.float8_e4m3fn).double()
    assert torch.equal(e4m3(x), expected)


def linear_case(num_tokens, seed, recipe=None):
    """A projection's output and gradients, and what they should be; rows of all magnitudes."""
    draw = torch.Generator().manual_seed(seed)

    def spread(rows, columns):
        sizes = 10.0 ** (2 * torch.randn(rows, 1, generator=draw).clamp(-2, 2))
        return (sizes * torch.randn(rows, columns, generator=draw)).bfloat16()

    model = wide_model(num_hidden_layers=1)
    with patch.object(precision, "_RECIPE", recipe or precision._RECIPE):
        multiply_in_float8(model)
    layer = decoder_layers(model)[0].mlp.up_proj
    layer.weight.data = spread(*layer.weight.shape) / 100
    x, grad = spread(num_tokens, 64).requires_grad_(), spread(num_tokens, 128)
    output = layer(x[None])[0]
    found = (output.detach(), *torch.autograd.grad(output, [x, layer.weight], grad))
    return found, float8_twin.projection(x, layer.weight, grad)


def check_products(found, wanted):
    for actual, expected in zip(found, wanted, strict=True):
        rows = expected.abs().amax(1, keepdim=True)
        assert actual.dtype == torch.bfloat16
        assert float(((actual.double() - expected).abs() / rows).max()) < 2**-8


@pytest.mark.usefixtures("float8")
@table("num_tokens", [1, 16, 37])
def test_products_are_the_definition(num_tokens):
    check_products(*linear_case(num_tokens, seed=num_tokens))


@pytest.mark.usefixtures("float8")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp"])
def test_other_scales_are_not_the_definition(recipe):
    with pytest.raises(AssertionError):
        check_products(*linear_case(37, seed=0, recipe=recipe))


# ---------------------------------------------------------------- whole models


def trained(model, rows, **settings):
    trainer = make_trainer(model, **settings)
    loss, _ = trainer.forward_backward(rows)
    return trainer, float(loss), gradients(trainer)


def distance(found, wanted):
    return {n: float((found[n] - w).norm() / w.norm()) for n, w in wanted.items()}


@pytest.mark.usefixtures("float8")
@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_every_parameter_has_a_gradient_near_that_of_bfloat16(family):
    rows = random_rows(7)
    near_policy(rows, make_trainer(wide_model(family=family)))
    plain, _, wanted = trained(wide_model(family=family), rows)
    trainer, _, found = trained(wide_model(family=family), rows, matmul_precision="fp8")
    apart = distance(found, wanted)
    assert found.keys() == wanted.keys()
    assert 0.005 < max(apart.values()) < GRADIENT_ERROR, apart

    # What others see of the model: names, order, shapes, formats.
    def seen(trainer):
        weights = [(n, t.shape, t.dtype) for n, t in trainer.named_weights()]
        masters = [(n, p.shape, p.dtype) for n, p in trainer.policy.masters.items()]
        state = {n: (t.shape, t.dtype) for n, t in trainer.state_dict()[0].items()}
        modes = [module.training for module in trainer.policy.model.modules()]
        return weights, masters, state, modes

    assert seen(trainer) == seen(plain)


@pytest.mark.usefixtures("float8")
def test_log_probs_do_not_depend_on_what_a_row_is_packed_with():
    rows = random_rows(6)

    def apart(recipe):
        with patch.object(precision, "_RECIPE", recipe):
            trainer = make_trainer(wide_model(), matmul_precision="fp8")
            together = trainer.logprobs(rows)
            alone = [trainer.logprobs([row])[0] for row in rows]
        return max(float((a - b).abs().max()) for a, b in zip(together, alone, strict=True))

    assert apart("rowwise") < apart("tensorwise") / 10


@pytest.mark.usefixtures("float8")
def test_a_policy_has_no_divergence_from_itself_as_reference():
    rows = random_rows(6)

    def apart(of_reference):
        trainer = make_trainer(wide_model(), matmul_precision="fp8")
        reference = make_reference(wide_model(), matmul_precision=of_reference)
        pairs = zip(trainer.logprobs(rows), logprobs_of(reference, rows), strict=True)
        return max(float((a - b).abs().max()) for a, b in pairs)

    assert apart("fp8") == 0
    assert apart("default") > 1e-3, "the planted bug: a reference that multiplies otherwise"


@pytest.mark.usefixtures("float8")
def test_projections_alone_are_replaced_and_only_those_that_fit():
    model = wide_model(intermediate_size=72, tie_word_embeddings=False)
    before = dict(export_weights(model))
    plain = {name: type(module) for name, module in model.named_modules()}
    sampled = alias_module(model)  # what an engine computes with
    apply_matmul_precision(model, "fp8", CPU)
    replaced = {n for n, module in model.named_modules() if type(module) is not plain[n]}
    assert replaced == {
        f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qkvo"
    }
    assert {name: type(module) for name, module in sampled.named_modules()} == plain
    mine, theirs = dict(export_weights(model)), dict(export_weights(sampled))
    assert mine.keys() == theirs.keys() == before.keys()
    assert all(
        w.data_ptr() == theirs[n].data_ptr() == before[n].data_ptr() for n, w in mine.items()
    )


# ---------------------------------------------------------------- what is refused


@table(
    "name, dtype, device, capability, reason",
    [
        ("tf32", torch.float32, CPU, (9, 0), "needs an NVIDIA GPU, and this run is on cpu"),
        ("tf32", torch.float32, GPU, (7, 5), r"capability 8\.0, and Test GPU has 7\.5"),
        ("tf32", torch.bfloat16, GPU, (9, 0), "in float32, and model.dtype is bfloat16"),
        ("fp8", torch.bfloat16, CPU, (9, 0), "needs an NVIDIA GPU, and this run is on cpu"),
        ("fp8", torch.bfloat16, GPU, (8, 6), r"capability 8\.9, and Test GPU has 8\.6"),
        ("fp8", torch.float32, GPU, (9, 0), "in bfloat16, and model.dtype is float32"),
    ],
)
def test_devices_and_formats_that_do_not_serve(name, dtype, device, capability, reason):
    with (
        patch("torch.cuda.get_device_capability", lambda _: capability),
        patch("torch.cuda.get_device_name", lambda _: "Test GPU"),
        pytest.raises(UserError, match=f"matmul_precision is {name}, but .*{reason}"),
    ):
        require_matmul_precision(name, dtype, device)


def test_R25_a_missing_extra_is_told_before_a_model_is_touched(monkeypatch):
    monkeypatch.setattr("hone.extras.is_installed", lambda _: False)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    with pytest.raises(UserError, match=r"needs the `torchao` .*pip install 'torchao>=0\.18'"):
        require_matmul_precision("fp8", torch.bfloat16, GPU)


def test_a_trainer_refuses_before_it_changes_the_model():
    model = wide_model()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(UserError, match=r"matmul_precision"):
        make_trainer(model, matmul_precision="fp8")
    assert [type(module) for module in model.modules()] == kinds


def test_tf32_is_torchs_setting_and_default_is_none(monkeypatch):
    said = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", said.append)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    model = tiny_model()
    apply_matmul_precision(model, "default", GPU)
    assert said == []
    apply_matmul_precision(model, "tf32", GPU)
    assert said == ["high"]
    assert any(type(module) is nn.Linear for module in decoder_layers(model).modules())
