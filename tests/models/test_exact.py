"""Exact mode's matrix product in Triton's interpreter, its gradients, and what it refuses."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, Qwen3Config

from hone.models import exact
from tests.attention.hopper import products
from tests.interpreted import run_interpreted
from tests.tables import table

needs_triton = pytest.mark.skipif(not find_spec("triton"), reason="triton cannot be imported")
SHAPES = ("even", "odd", "long")


@pytest.fixture(scope="module")
def results():
    return run_interpreted("tests.models.interpreted_exact")


@needs_triton
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_equals_twin(results, shape):
    assert results["error"][shape] < 2e-6


@needs_triton
@table("shape", SHAPES)
def test_bits_of_a_row_depend_on_the_row_alone(results, shape):
    unequal = results["unequal"][shape]
    assert len(unequal) == 42
    assert set(unequal.values()) == {0}, unequal


@needs_triton
def test_bits_catch_splits_that_follow_from_the_batch(results):
    assert results["splits"] > 1, "a long K must be split"
    assert results["planted"] > 0


@needs_triton
def test_output_has_the_dtype_of_its_input_unless_told(results):
    assert results["dtypes"] == ["torch.float16", [0, 128]]


@pytest.mark.slow
@needs_triton
def test_products_are_summed_by_16_on_hopper(tmp_path, monkeypatch):
    """The one order of additions that the code leaves to the matrix unit."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # triton 3.9 warns where it is unset
    from hone.models import exact_kernel as kernels

    for tile in kernels.TILES:
        shape = f"m64n{tile.columns}k16" if tile.rows >= 64 else "m16n8k16"  # wgmma, mma.sync
        for is_split, parallel in ((False, False), (True, False), (True, True)):
            found = products(
                kernels._matmul_kernel,
                {"output_ptr": "*bf16", "bias_ptr": "*bf16"}
                | {"x_desc": f"tensordesc<bf16[{tile.rows},{tile.depth}]>"}
                | {"weight_desc": f"tensordesc<bf16[{tile.columns},{tile.depth}]>"},
                {"HAS_BIAS": True, "IS_SPLIT": is_split, "PARALLEL": parallel}
                | {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth}
                | {"UNIT": kernels.SPLIT_UNIT, "BAND": kernels.BAND},
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
            )
            assert found == {shape}, tile


@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_has_the_gradient_of_torch(monkeypatch, has_bias):
    monkeypatch.setattr(exact, "_matmul", lambda x, weight, bias, dtype: F.linear(x, weight, bias))
    shapes = [(5, 8), (6, 8), (6,)][: 2 + has_bias]
    ours = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    theirs = [x.detach().clone().requires_grad_() for x in ours]
    cotangent = torch.randn(5, 6, dtype=torch.float64)
    actual = torch.autograd.grad(exact.linear(*ours), ours, cotangent)
    expected = torch.autograd.grad(F.linear(*theirs), theirs, cotangent)
    torch.testing.assert_close(actual, expected)


def test_linear_skips_gradients_that_nobody_wants(monkeypatch):
    monkeypatch.setattr(exact, "_matmul", lambda x, weight, bias, dtype: F.linear(x, weight, bias))
    x, weight = torch.randn(3, 8), torch.randn(4, 8, requires_grad=True)
    exact.linear(x, weight).sum().backward()
    assert x.grad is None
    assert weight.grad is not None


def test_cpu_is_refused():
    assert "got cpu" in exact.exact_supported(Qwen3Config(), torch.device("cpu"))


@needs_triton
@table(
    "config, capability, expected",
    [
        (Qwen3Config(dtype=torch.bfloat16), (9, 0), None),
        (LlamaConfig(dtype="float16"), (9, 0), None),
        (Qwen3Config(dtype=torch.bfloat16), (7, 5), "compute capability 8.0 or later, got T4"),
        (Qwen3Config(dtype=torch.float32), (9, 0), "bfloat16 or float16, got torch.float32"),
        (Qwen3Config(head_dim=80), (9, 0), "does not compute head_dim = 80"),
        (Qwen3Config(intermediate_size=1003), (9, 0), "intermediate_size = 1003"),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused(config, capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    reason = exact.exact_supported(config, torch.device("cuda"))
    assert reason is None if expected is None else expected in reason
