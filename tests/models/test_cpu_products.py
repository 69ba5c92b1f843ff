"""Products by oneDNN against those of float64, forward and backward, and where they are used."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.models import cpu_products
from hone.models.cpu_products import linear, multiply_by_onednn
from tests.tables import table

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)


@pytest.fixture(autouse=True)
def _onednn_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    """Whatever processor this is."""
    monkeypatch.setattr(cpu_products, "_is_faster", lambda: True)


IS_FASTER = cpu_products._is_faster.__wrapped__  # pyright: ignore[reportPrivateUsage]


@table(
    "maker, has_mkl, expected",
    [
        ("AuthenticAMD", True, True),
        ("GenuineIntel", True, False),
        ("GenuineIntel", False, True),
        ("", True, True),
    ],
)
def test_mkl_multiplies_on_processors_of_intel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, maker: str, has_mkl: bool, expected: bool
) -> None:
    facts = tmp_path / "cpuinfo"
    if maker:
        facts.write_text(f"processor\t: 0\nvendor_id\t: {maker}\n")
    monkeypatch.setattr(cpu_products, "_CPU_FACTS", facts)
    monkeypatch.setattr("platform.processor", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: has_mkl)
    assert IS_FASTER() == expected


def test_where_mkl_is_faster_layers_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "_is_faster", lambda: False)
    monkeypatch.setattr(cpu_products, "_product", None)  # not called
    module = nn.Linear(128, 128)
    multiply_by_onednn(module)
    assert "forward" not in vars(module)
    x = draw(128, 128, seed=1)
    assert torch.equal(linear(x, module.weight, module.bias), module(x))


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@table("widths", [(96, 160), (160, 96)])
@table("rows", [(131,), (1, 131), (2, 70)])
@table("has_bias", [False, True])
def test_numbers_and_gradients_are_those_of_float64(
    monkeypatch: pytest.MonkeyPatch,
    widths: tuple[int, int],
    rows: tuple[int, ...],
    has_bias: bool,
) -> None:
    products: list[torch.Size] = []

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        products.append(x.shape)
        return product(x, weight, bias)

    product = cpu_products._product  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(cpu_products, "_product", counted)
    num_in, num_out = widths
    operands = [draw(*rows, num_in, seed=1), draw(num_out, num_in, seed=2)]
    operands += [draw(num_out, seed=3)] if has_bias else []
    upstream = draw(*rows, num_out, seed=4)
    own = [x.clone().requires_grad_() for x in operands]
    wide = [x.double().requires_grad_() for x in operands]

    output = linear(*own)
    output.backward(upstream)
    expected = F.linear(*wide)
    expected.backward(upstream.double())

    assert len(products) == 3
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=5e-5)
    for x, reference in zip(own, wide, strict=True):
        assert x.grad is not None
        assert reference.grad is not None
        assert x.grad.shape == x.shape
        torch.testing.assert_close(x.grad.double(), reference.grad, rtol=0, atol=2e-4)


def test_a_frozen_weight_gets_no_gradient() -> None:
    x, weight = draw(64, 128, seed=1).requires_grad_(), draw(256, 128, seed=2)
    linear(x, weight).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(x.grad, weight.sum(0).expand(64, -1), rtol=0, atol=1e-4)


@table("dtype, num_rows", [(torch.float64, 512), (torch.bfloat16, 512), (torch.float32, 4)])
def test_others_are_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, num_rows: int
) -> None:
    monkeypatch.setattr(cpu_products, "_product", None)  # not called
    x, weight = draw(num_rows, 64, seed=1).to(dtype), draw(64, 64, seed=2).to(dtype)
    assert torch.equal(linear(x, weight), F.linear(x, weight))


def test_layers_of_a_module_and_of_its_copies_use_their_own_weights() -> None:
    module = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
    x = draw(128, 128, seed=1)
    before = module(x)
    multiply_by_onednn(module)
    twin = copy.deepcopy(module)
    torch.testing.assert_close(module(x), before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(x).any()
    torch.testing.assert_close(module(x), before)
    assert type(module[0]) is nn.Linear


def test_products_of_many_shapes_take_little_memory() -> None:
    """In a process of its own, since others have made products. Without a bound it is 200 MiB."""
    program = """
from hone.models import cpu_products
from hone.models.cpu_products import linear
from hone.observe.host_memory import host_memory
import torch

cpu_products._is_faster = lambda: True
x_TK, weight_NK = torch.ones(800, 64), torch.ones(192, 64)
used = []
for num_rows in range(400, 800):
    linear(x_TK[:num_rows], weight_NK)
    used.append(1024 * host_memory()["mem/rss_without_caches_gib"])
print(used[-1] - used[0])
"""
    others = {n: x for n, x in os.environ.items() if not n.endswith("CACHE_CAPACITY")}
    child = [sys.executable, "-c", program]
    grown = subprocess.run(child, env=others, check=True, capture_output=True, text=True).stdout
    assert float(grown) < 110
