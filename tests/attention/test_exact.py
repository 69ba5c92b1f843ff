"""The exact attention in Triton's interpreter: right, and the same bits however it is computed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.attention.hopper import products
from tests.interpreted import run_interpreted
from tests.tables import table

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="triton cannot be imported")

CASES = ("two heads a key head", "three heads a key head", "window")
MAX_ERROR = 2e-3


@pytest.fixture(scope="module")
def results():
    return run_interpreted("tests.attention.interpreted_exact")


@pytest.mark.parametrize("case", CASES)
def test_packed_equals_twin(results, case):
    assert results[case]["error"] < MAX_ERROR


@table("case", CASES)
def test_bits_depend_on_a_query_and_its_keys_alone(results, case):
    unequal = {name: count for name, count in results[case].items() if name != "error"}
    assert len(unequal) >= 15
    assert set(unequal.values()) == {0}, unequal


def test_long_context_decodes_to_the_bits_of_training(results):
    assert results["long context"] == 0


@pytest.mark.parametrize("bug", ["splits by batch", "narrow tiles"])
def test_bits_catch(results, bug):
    assert results["planted"][bug] > 0


def test_empty_sequence_gives_zeros(results):
    assert all(results["empty"])


def test_log_sums_are_natural_logarithms(results):
    assert results["log sums"] < 1e-3


def test_products_are_summed_by_16_on_hopper(tmp_path, monkeypatch):
    """The one order of additions that the code leaves to the matrix unit."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # triton 3.9 warns where it is unset
    from hone.attention import exact

    half, single, number = "*bf16", "*fp32", "*i32"
    tables = {"tables_ptr": number, "borders_ptr": number}
    for tile, page, rows in ((exact.DECODE_TILE, 16, "m16"), (exact.PREFILL_TILE, 0, "m64")):
        found = products(
            exact._attend_kernel,
            {**tables, "lengths_ptr": number, "output_ptr": half, "scale": "fp32"}
            | {"log_sums_ptr": single, "sums_ptr": single}
            | {"q_ptr": half, "k_ptr": half, "v_ptr": half},
            {"NUM_KV_HEADS": 8, "GROUP": 2, "HEAD_DIM": 128, "PAGE": page, "WINDOW": 0}
            | {"ROWS": tile.rows, "KEYS": 64, "PARALLEL": False},
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        assert found
        assert all(shape.startswith(rows) and shape.endswith("k16") for shape in found), found
    found = products(
        exact._fold_kernel,
        {"output_ptr": half, "parts_ptr": single, "maxima_ptr": single, "sums_ptr": single}
        | {"borders_ptr": number, "lengths_ptr": number},
        {"NUM_HEADS": 16, "HEAD_DIM": 128, "WINDOW": 0},
        num_warps=1,
    )
    assert not found
