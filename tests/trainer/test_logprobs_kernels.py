"""Kernels of log-probabilities in Triton's interpreter, against torch in float64."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.interpreted import run_interpreted
from tests.trainer.logprob_cases import BUGS, CASES

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="triton cannot be imported")


@pytest.fixture(scope="module")
def results():
    return run_interpreted("tests.trainer.interpreted_logprobs")


@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_their_twins(results, case):
    assert max(results[case]) < 3e-6, results[case]


def test_gradient_is_rounded_to_its_format(results):
    assert 1e-6 < results["half"][-1] < 1e-3


@pytest.mark.parametrize("bug", BUGS)
def test_planted_wrong_labels_are_caught(results, bug):
    assert max(results[bug]) > 1e-2


@pytest.mark.parametrize("is_full", [True, False])
def test_kernels_compile_for_hopper(tmp_path, monkeypatch, is_full):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # triton 3.9 warns where it is unset
    from hone.trainer import logprob_kernels as kernels
    from tests.attention.hopper import products

    pointers = ("statistics", "logits", "normaliser", "entropy", "grad_logprobs", "grad_entropy")
    types = {f"{name}_ptr": "*fp32" for name in pointers}
    types |= {"gradient_ptr": "*bf16", "labels_ptr": "*i64"}
    types |= {"temperature": "fp32", "softcap": "fp32"}
    options: dict[str, object] = {"HAS_SOFTCAP": is_full, "WITH_ENTROPY": is_full, "BLOCK": 2048}
    absent = {} if is_full else {"entropy_ptr": None, "grad_entropy_ptr": None}
    for kernel, constants in (
        (kernels._statistics_kernel, options),
        (kernels._gradient_kernel, options | absent),
    ):
        used = {name: kind for name, kind in types.items() if name in kernel.arg_names}
        assert products(kernel, used, constants, num_warps=4) == set()
