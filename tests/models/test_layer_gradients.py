"""Gradients of the layer kernels in Triton's interpreter, against torch in float64."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.interpreted import run_interpreted

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="triton cannot be imported")
CASES = {
    "rms_norm": 3,
    "silu_mul": 2,
    "norm and rotate": 6,
    "norm and rotate odd heads": 6,
    "rotate": 4,
}
"""And the number of outputs and gradients."""


@pytest.fixture(scope="module")
def results():
    return run_interpreted("tests.models.interpreted_layer_gradients")


@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_their_twins(results, case):
    assert len(results[case]) == CASES[case]
    assert max(results[case]) < 1e-5, results[case]


@pytest.mark.parametrize("complete", [True, False])
def test_kernels_compile_for_hopper(tmp_path, monkeypatch, complete):
    """With all that a kernel may take, and without what it need not have."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # triton 3.9 warns where it is unset
    from hone.models import layer_gradients as gradients
    from tests.attention.hopper import products

    names = "gradient grad grad_x grad_q grad_k grad_v x weight gate_up qkv rotary q_norm k_norm"
    types = {f"{name}_ptr": "*bf16" for name in names.split()}
    types |= {"parts_ptr": "*fp32", "positions_ptr": "*i64", "eps": "fp32"}
    norm = {"WIDTH": 1024, "ROWS": 4, "BLOCK": 1024}
    heads = {"NUM_HEADS": 16, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK": 64}
    heads["ROWS"] = gradients.ROTATE_ROWS
    norms = ("q_norm_ptr", "k_norm_ptr")
    for kernel, constants, optional in (
        (gradients._norm_gradient_kernel, norm, ()),
        (gradients._silu_gradient_kernel, {"WIDTH": 3072, "BLOCK": 1024}, ()),
        (gradients._rotate_gradient_kernel, heads, norms),
    ):
        absent = {} if complete else dict.fromkeys(optional)
        present = [name for name in kernel.arg_names if name in types and name not in absent]
        used = {name: types[name] for name in present}
        assert products(kernel, used, constants | absent, num_warps=8) == set()
