"""The Triton kernels, run by Triton's interpreter on the CPU, against the float64 twin."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from tests.interpreted import run_interpreted

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="triton cannot be imported")


@pytest.fixture(scope="module")
def results():
    return run_interpreted("tests.attention.interpreted_kernels")


def test_decode_equals_twin(results):
    wrong = {case: error for case, (error, limit) in results["errors"].items() if error >= limit}
    assert not wrong
    assert len(results["errors"]) > 30


def test_decode_check_catches(results):
    assert len(results["planted"]) == 3
    assert min(results["planted"].values()) >= 2e-6


def test_writes_are_exact_and_empty_sequences_give_zeros(results):
    assert all(results["writes"])
    assert all(results["empty"])


def test_whoever_merges_the_result_has_the_same_bits(results):
    everyone = ["the group", "the last split", "the only split"]
    assert results["merged"] == {"by": everyone, "same": True}
    assert results["merged wrongly"] == {"by": everyone, "same": False}


def test_splits_follow_shapes_not_lengths():
    from hone.attention import triton_decode as kernels

    tuning = kernels.choose_tuning(2, 128, is_fp8=False)
    cpu = torch.device("cpu")
    filling = kernels._num_processors(cpu) * tuning.programs_per_processor // 2
    assert kernels._num_splits(tuning, 1, 1, 2, cpu) == 1
    assert kernels._num_splits(tuning, 1, 2 * tuning.tile + 1, 2, cpu) == 3
    assert kernels._num_splits(tuning, 64, 8192, 2, cpu) == filling
    assert kernels._num_splits(tuning, 64, 8192, 1000, cpu) == 1


def compile_for_hopper(kernel, pointers, constants, **options):
    """What the kernel becomes for compute capability 9.0; needs no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    types = {name: "constexpr" if name in constants else "i64" for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature={**types, **pointers}, constexprs=constants)
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


# Each kind of keys, and each of their formats, in the quick suite; all pairs in the whole one.
@pytest.mark.parametrize(
    ("kind", "is_fp8"),
    [
        ("plain", False),
        ("window", True),
        ("shared", False),
        slow("plain", True),
        slow("window", False),
        slow("shared", True),
    ],
)
def test_decode_compiles_for_hopper(tmp_path, monkeypatch, kind, is_fp8):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # triton 3.9 warns where it is unset
    from hone.attention import triton_decode as kernels
    from hone.attention.decode_tiles import DecodeShape

    half, single, number = "*bf16", "*fp32", "*i32"
    types = {"output_ptr": half, "partial_ptr": single, "log_sums_ptr": single, "q_ptr": half}
    types |= {"counters_ptr": number, "block_tables_ptr": number, "context_lens_ptr": number}
    types |= {"cache_ptr": "*fp8e4nv" if is_fp8 else half, "scale": "fp32"}
    types |= dict.fromkeys(("batch", "groups", "q_token_stride", "q_head_stride"), "i32")
    shape = DecodeShape(
        num_kv_heads=8,
        heads_per_key=2,
        head_dim=64,  # a larger tile is the same code, which takes longer to compile
        page=16,
        members=8,
        is_fp8=is_fp8,
        window=512 if kind == "window" else 0,
        softcap=50.0 if kind == "window" else 0.0,
        tile=32,
    )
    constants = {"S": shape, "OVERLAP": True}
    absent = () if is_fp8 else ("scales_ptr",)
    types |= {"scales_ptr": single} if is_fp8 else {}
    groups = ("places_ptr", "members_ptr", "shared_lens_ptr", "starts_ptr")
    if kind == "shared":
        types |= dict.fromkeys(groups, number)
    else:
        absent += groups
    constants |= dict.fromkeys(absent)
    options = {"num_warps": 2, "launch_pdl": True}
    ptx = compile_for_hopper(kernels._decode_kernel, types, constants, **options)["ptx"]
    early, late = ptx.split("griddepcontrol.wait")
    for access in ("st.global", "atom"):
        assert access not in early, f"{access} before the kernel ahead has ended"
        assert access in late


@pytest.mark.parametrize("is_fp8", [False, True])
def test_write_compiles_for_hopper(tmp_path, monkeypatch, is_fp8):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    from hone.attention import triton_write as kernels

    types = {"k_ptr": "*bf16", "v_ptr": "*bf16", "slots_ptr": "*i64"}
    types |= {"cache_ptr": "*fp8e4nv", "scales_ptr": "*fp32"} if is_fp8 else {"cache_ptr": "*bf16"}
    constants = {"HEAD_DIM": 128, "NUM_HEADS": 8, "BLOCK": 1024}
    constants |= {} if is_fp8 else {"scales_ptr": None}
    assert compile_for_hopper(kernels._write_kernel, types, constants)["cubin"]
