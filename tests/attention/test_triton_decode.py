"""The Triton kernels, run by Triton's interpreter on the CPU, against the float64 twin."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.attention.cases import DECODE_CASES, DTYPES

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="triton cannot be imported")


@pytest.fixture(scope="module")
def results():
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.attention.interpreted_kernels"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", DECODE_CASES)
def test_decode_equals_twin(results, dtype, case):
    assert results[f"{dtype} {case}"] < DTYPES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_is_exact(results, dtype):
    assert results[f"{dtype} write"]


@pytest.mark.parametrize("num_splits", [1, 4])
def test_empty_sequence_gives_zeros(results, num_splits):
    assert results[f"empty {num_splits}"]


@pytest.mark.parametrize("bug", ["tables swapped", "context one short"])
def test_decode_check_catches(results, bug):
    assert not results[bug] < DTYPES["float32"]


def compile_for_hopper(kernel, pointers, constants, **options):
    """The kernel's machine code for compute capability 9.0; needs no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    types = {name: "constexpr" if name in constants else "i64" for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature={**types, **pointers}, constexprs=constants)
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]


def test_kernels_compile_for_hopper(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # triton 3.9 warns where it is unset
    from hone.attention import triton_decode as kernels

    half, single, number = "*bf16", "*fp32", "*i32"
    heads = {"HEAD_DIM": 128, "BLOCK_D": 128, "SPLITS": 8}
    scratch = {"output_ptr": half, "partial_ptr": single, "log_sums_ptr": single}
    tables = {"block_tables_ptr": number, "context_lens_ptr": number}
    assert compile_for_hopper(
        kernels._decode_kernel,
        {**scratch, **tables, "q_ptr": half, "cache_ptr": half, "scale": "fp32"},
        {**heads, "NUM_KV_HEADS": 8, "GROUP": 2, "PAGE": 16, "ROWS": 16, "TILE": 64}
        | {"WINDOW": 512, "SOFTCAP": 50.0},
        num_warps=4,
    )
    assert compile_for_hopper(kernels._merge_kernel, scratch, heads)
    assert compile_for_hopper(
        kernels._write_kernel,
        {"k_ptr": half, "v_ptr": half, "cache_ptr": half, "slots_ptr": "*i64"},
        {"HEAD_DIM": 128, "WIDTH": 1024, "BLOCK": 1024},
    )
