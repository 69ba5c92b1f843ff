"""The decode kernel of gated delta nets: in Triton's interpreter, and compiled for Hopper."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from hone.attention.recurrent.mixing import DeltaHeads
from tests.interpreted import run_interpreted
from tests.models.test_layer_kernels import HALF, check_waits, compile_for
from tests.recurrent.steps import Step, draw_net
from tests.tables import table

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="triton cannot be imported")

HEADS = {"0.8B": (16, 16), "9B": (16, 32), "27B": (16, 48)}
"""Of keys and of values."""


def heads_of(name: str) -> DeltaHeads:
    num_keys, num_values = HEADS[name]
    return DeltaHeads(
        num_key_heads=num_keys, num_value_heads=num_values, key_dim=128, value_dim=128
    )


def test_R4_two_tokens_are_those_of_plain_torch():
    results = run_interpreted("tests.recurrent.interpreted_decode")
    assert results["cases"] == 8
    assert not results["wrong"]
    assert not results["missed"], "planted bugs"
    assert results["shared row"]


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # triton 3.9 warns where it is unset
    from hone.attention.recurrent import decode_kernel

    return decode_kernel


@table("name", HEADS)
def test_the_kernel_compiles_for_hopper(kernel, name):
    """It reads whole lines of a state at once, before it waits, and writes after that."""
    heads = heads_of(name)
    tuning = kernel.choose_tuning(heads)
    repeats = heads.num_value_heads // heads.num_key_heads
    constants = {
        "KEY_HEADS": heads.num_key_heads,
        "REPEATS": repeats,
        "REPEAT_BLOCK": 1 << (repeats - 1).bit_length(),
        "KEY_DIM": 128,
        "VALUE_DIM": 128,
        "COLUMNS": tuning.columns,
        "TAPS": 4,
        "TAP_BLOCK": 4,
    }
    halves = ("output", "projected", "tails", "conv", "log_rate", "step_bias", "norm")
    pointers = {f"{half}_ptr": HALF for half in halves}
    pointers |= {"states_ptr": "*fp32", "rows_ptr": "*i64", "eps": "fp32", "scale": "fp32"}
    ptx = compile_for(90, kernel._mix_kernel, pointers, constants, num_warps=tuning.num_warps)
    ptx = ptx.asm["ptx"]
    check_waits(ptx)
    before, after = ptx.split("griddepcontrol.wait")
    assert "ld.global.v4.b32" in before
    assert "st.global.v4.b32" in after


@table("sizes, served", [((128, 128), True), ((8, 16), True), ((8, 12), False), ((256, 64), False)])
def test_heads_of_other_sizes_are_left_to_torch(kernel, sizes, *, served):
    from hone.models import layer_kernels

    key_dim, value_dim = sizes
    heads = DeltaHeads(num_key_heads=1, num_value_heads=2, key_dim=key_dim, value_dim=value_dim)
    net = draw_net(heads, torch.float32)
    assert kernel.is_served(net) == served
    if served:
        return
    step = Step.draw(net, [2, 0], 3)
    twin = step.copy()
    found = layer_kernels.mix_heads(step.projected, net, step.context)
    assert torch.equal(found, twin.reference())
    assert torch.equal(step.states, twin.states)
