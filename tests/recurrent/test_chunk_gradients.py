"""Gradients inside of chunks: in Triton's interpreter, and compiled for Hopper."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.interpreted import run_interpreted
from tests.models.test_layer_kernels import HALF, compile_for

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="triton cannot be imported")


def test_gradients_are_those_of_autograd():
    results = run_interpreted("tests.recurrent.interpreted_chunks")
    assert results["cases"] == 6
    assert not results["wrong"]
    assert not results["missed"], "planted bugs"


@pytest.mark.parametrize("repeats", [1, 2])
def test_the_kernel_compiles_for_hopper(tmp_path, monkeypatch, repeats):
    """With the products of its matrix units."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # triton 3.9 warns where it is unset
    from hone.attention.recurrent import chunk_gradients as module

    tuning = module.TUNING
    constants = {
        "HEADS": 16 * repeats,
        "REPEATS": repeats,
        "KEY_DIM": 128,
        "VALUE_DIM": 128,
        "KEYS": tuning.keys,
        "VALUES": tuning.values,
        "SIZE": 64,
    }
    halves = ("dq", "dk", "dw", "q", "k", "v", "do", "dv", "h", "dh")
    pointers = {f"{name}_ptr": HALF for name in halves}
    pointers |= {"dg_ptr": "*fp32", "decays_ptr": "*fp32"}
    pointers |= {"borders_ptr": "*i64", "chunks_ptr": "*i64", "num_tokens": "i32", "scale": "fp32"}
    kernel = compile_for(90, module._chunk_kernel, pointers, constants, num_warps=tuning.num_warps)
    assert "wgmma" in kernel.asm["ptx"]
    assert kernel.metadata.shared < 160 * 1024
