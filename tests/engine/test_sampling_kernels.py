"""The sampling kernels in Triton's interpreter on the CPU, against float64 and the yardstick."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from hone.types import SamplingParams
from tests.engine import reference
from tests.engine.test_sampler import assert_counts_fit
from tests.interpreted import run_interpreted
from tests.tables import table

pytestmark = [
    pytest.mark.skipif(not find_spec("triton"), reason="triton cannot be imported"),
]

DRAWS = [
    *(f"float32 {size}" for size in (1, 7, 127, 1037, 20_011, 151_939)),
    *(f"float16 {size}" for size in (256, 1037)),
]
LEVEL_TOLERANCE = 1e-6
LOGPROB_TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def results():
    return run_interpreted("tests.engine.interpreted_sampling")


@table("filtered", [False, True])
@table("case", DRAWS)
def test_R5_tokens_invert_the_distribution_they_are_scored_under(results, case, filtered):
    level_error, logprob_error = results[f"draws {case} {filtered}"]
    assert level_error < LEVEL_TOLERANCE
    assert logprob_error < LOGPROB_TOLERANCE


@table(
    "bug",
    [
        "temperature ignored",
        "top-k off by one",
        "top-p of everything",
        "seeds ignored",
        "log-prob before filters",
    ],
)
def test_R5_planted_bugs_are_caught(results, bug):
    level_error, logprob_error = results[bug]
    assert level_error > LEVEL_TOLERANCE or logprob_error > LOGPROB_TOLERANCE


@table("case", ["0 4096", "0 16", "0.25 4096", "4.0 16"])
def test_kept_tokens_are_those_of_the_yardstick(results, case):
    assert results[f"kept {case}"] == 0


@pytest.mark.parametrize("filter_name", ["top-p", "min-p"])
def test_borders_that_are_met_exactly(results, filter_name):
    assert results[f"exact {filter_name}"] == 0


def test_greedy_takes_the_lowest_of_equal_tokens(results):
    assert results["greedy ties"]


def test_extreme_uniform_numbers_give_possible_tokens(results):
    assert results["extremes"] == [[5, 5], [989, 989]]


def test_kept_token_check_catches_top_k_off_by_one(results):
    assert results["kept, top-k off by one"] > 2


def test_R5_counts_follow_the_distribution(results):
    logits, counts = results["counts"]
    params = SamplingParams(max_tokens=1, temperature=0.7)
    assert_counts_fit(np.array(counts), reference.distribution(np.array(logits), params))


def test_a_row_does_not_depend_on_its_batch(results):
    assert results["independent"]


def test_padding_rows_change_nothing(results):
    assert results["padding"]


def test_token_logprobs_have_the_bits_of_sampling(results):
    assert results["scored"]


@pytest.mark.parametrize("filtered", [False, True])
def test_logits_that_are_no_numbers_give_nan(results, filtered):
    assert results[f"no numbers {filtered}"]


@pytest.mark.parametrize("filtered", [False, True])
def test_impossible_tokens_are_never_drawn(results, filtered):
    assert results[f"impossible {filtered}"] == 0


POINTERS = {
    "*fp32": "maxima sums temperatures borders candidates log_min_ps top_ps logprobs",
    "*i64": "top_ks token_ids positions seeds",
    "*i32": "last_ids",
    "*i1": "greedy",
    "*bf16": "logits",
}


@pytest.mark.parametrize("unused", [(), ("borders_ptr", "last_ids_ptr")], ids=["all", "unfiltered"])
def test_kernels_compile_for_hopper(tmp_path, monkeypatch, unused):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # triton 3.9 warns where it is unset
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from hone.engine import sampling_kernels as kernels
    from hone.models import token_logprobs

    types = {f"{name}_ptr": kind for kind, names in POINTERS.items() for name in names.split()}
    numbers = {"VOCAB": 151_936, "BLOCK": 256, "NUM_BLOCKS": 594, "ALL_BLOCKS": 1024}
    numbers |= {"TILE_BLOCKS": 32, "CANDIDATES": 4096, **dict.fromkeys(unused)}
    for kernel, num_warps in (
        (token_logprobs._block_sums_kernel, token_logprobs.TILE_WARPS),
        (kernels._kept_sums_kernel, token_logprobs.TILE_WARPS),
        (kernels._border_kernel, kernels.SEARCH_WARPS),
        (kernels._draw_kernel, token_logprobs.ROW_WARPS),
        (token_logprobs._score_kernel, token_logprobs.ROW_WARPS),
    ):
        if unused and kernel is not kernels._draw_kernel:
            continue
        names = kernel.arg_names
        constants = {name: value for name, value in numbers.items() if name in names}
        signature = {
            name: "constexpr" if name in constants else types.get(name, "i32") for name in names
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        options = {"num_warps": num_warps}
        assert compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]
