"""Several processes train what one does, in every layout, or all fail with the same error.

What needs a group runs in `parallel_ranks`, in two and in four processes; it is judged here.
"""

from __future__ import annotations

from itertools import product
from math import prod

import pytest

from tests.rank_cases import beyond_limits, check_cases
from tests.ranks import parts_of, run_ranks
from tests.tables import check_rows
from tests.trainer.parallel_cases import LAYOUTS
from tests.trainer.parallel_ranks import BFLOAT16, BUGS, FLOAT8, SCHEDULES, layout_cases

WORLDS = [2, pytest.param(4, marks=pytest.mark.slow)]
KEYS = {"ring": "ring_size", "ulysses": "ulysses_size", "tensor": "tensor_parallel_size"}
AXES = {"context": ("ring", "ulysses")}
LIMITS = {"logprobs": 1e-5, "loss": 1e-5, "gradient": 1e-4, "metrics": 1e-3, "weights": 1e-3}


@pytest.fixture(scope="module", params=WORLDS)
def ranks(request):
    """What each rank found."""
    return parts_of(run_ranks("tests.trainer.parallel_ranks", request.param))


@pytest.fixture
def two(ranks):
    if len(ranks) != 2:
        pytest.skip("two processes show it")
    return ranks


def test_axes_are_laid_out_data_ring_ulysses_tensor(ranks):
    world = len(ranks)
    for layout, parallel in LAYOUTS[world].items():
        sizes = {axis: parallel.get(key, 1) for axis, key in KEYS.items()}
        sizes = {"data": world // prod(sizes.values()), **sizes}
        grid = list(product(*map(range, sizes.values())))
        for rank, found in enumerate(ranks):
            place = dict(zip(sizes, grid[rank], strict=True))
            place["context"] = place["ring"] * sizes["ulysses"] + place["ulysses"]
            outcome = found["axes"][layout]
            assert outcome["places"] == {axis: place[axis] for axis in outcome["members"]}
            for axis, members in outcome["members"].items():
                fixed = [a for a in sizes if a not in AXES.get(axis, (axis,))]
                assert members == [
                    other
                    for other, at in enumerate(grid)
                    if all(dict(zip(sizes, at, strict=True))[a] == place[a] for a in fixed)
                ], (layout, axis)
            assert outcome["values"] == [[float(r)] * (r + 1) for r in range(sizes["data"])]


@pytest.mark.parametrize(
    ("layout", "shards", "sharers"),
    [
        ("stage 3", {"shard": 4}, [[0, 1, 2, 3]] * 4),
        ("stage 0", {"replicate": 4, "shard": 1}, [[[0], [1], [2], [3]]] * 4),
        ("stage 3, two copies", {"replicate": 2, "shard": 2}, [[[0, 1], [2, 3]]] * 4),
        ("data 2 x tensor 2", {"shard": 2}, [[0, 2], [1, 3]] * 2),
        ("data 2 x ring 2", {"replicate": 2, "shard": 2}, [[[0, 1], [2, 3]]] * 4),
    ],
)
def test_shards_lie_on_neighbours(ranks, layout, shards, sharers):
    if len(ranks) != 4:
        pytest.skip("four processes show it")
    outcomes = [found["axes"][layout] for found in ranks]
    assert [outcome["shards"] for outcome in outcomes] == [shards] * 4
    assert [outcome["sharers"] for outcome in outcomes] == sharers


def test_tensors_gathered_together_are_those_gathered_one_by_one(ranks):
    for found in ranks:
        assert not any(found["gathering"].values())


def test_R1_R8_every_layout_computes_what_one_process_does(ranks):
    check_cases(ranks, "layouts", layout_cases(len(ranks)), LIMITS)


def test_R10_R23_ranks_without_rows_change_nothing(ranks):
    check_cases(ranks, "schedules", SCHEDULES, LIMITS)


def test_R10_disagreement_is_an_error_on_every_rank(ranks):
    for found in ranks:
        outcome = found["disagreements"]
        assert outcome.pop("afterwards") == ""
        assert len(outcome) == 5
        for message in outcome.values():
            assert message.startswith("DisagreementError: processes disagree on rows and micro-")


def test_R10_without_the_agreement_ranks_would_wait_for_each_other(two):
    """The planted bug: what the agreement is there for."""
    for found in two:
        assert "Timed out" in found["hang"] or "Connection closed" in found["hang"]


def test_masters_of_a_bfloat16_model_are_float32_and_those_of_one_process(two):
    for outcome in two[0]["bfloat16"].values():
        assert outcome["formats"] == ["torch.float32"]
    of_split_layers = two[0]["bfloat16"].pop("tensor")
    assert of_split_layers["same everywhere"]
    stages = {name: case for name, case in BFLOAT16.items() if name != "tensor"}
    check_cases(two[:1], "bfloat16", stages, LIMITS | {"gradient": 1e-6, "masters": 1e-6})


def test_products_in_float8_are_those_of_one_process(two):
    if two[0]["float8"] is None:
        pytest.skip("the extra fp8 is not installed")
    check_cases(two[:1], "float8", FLOAT8, LIMITS | {"gradient": 1e-6})


CAUGHT_BY = {
    "averages": {"gradient", "metrics"},
    "weights of own rows": {"gradient", "loss"},
    "norm of own shards": {"weights", "metrics"},
    "metrics of own rows": {"loss", "metrics"},
    "reduced in bfloat16": {"gradient", "weights"},
    "nothing": set(),
    "reduced in float32": set(),
}


def test_R1_R8_planted_bugs_are_caught(two):
    def check(bug, measures):
        outcome = two[0]["planted"][bug]
        beyond = beyond_limits(outcome, LIMITS, times=5).keys()
        assert measures <= beyond if measures else not beyond, outcome
        if bug in ("norm of own shards", "metrics of own rows"):
            assert not outcome["same everywhere"]

    assert CAUGHT_BY.keys() == BUGS.keys()
    check_rows(CAUGHT_BY.items(), check)


def test_R23_numbers_that_are_not_finite_stop_all_ranks_alike(two):
    for found in two:
        outcome = found["non_finite"]
        for message, unchanged, afterwards in outcome["gradients"]:
            assert message.startswith(
                "NonFiniteError: the gradient of model.layers.1.mlp.down_proj.weight is not finite"
            )
            assert unchanged
            assert afterwards == ""
        assert outcome["row"].startswith("NonFiniteError: advantages of sequence 'r4'")


@pytest.mark.parametrize(("model", "dtype"), [("float32, tied", "float32"), ("bfloat16",) * 2])
def test_R3_an_engine_on_each_rank_gets_whole_weights(two, model, dtype):
    for found in two:
        outcome = found["weight_sync"][model]
        assert outcome["version"] == 3
        assert outcome["equal"]
        assert outcome["same names"]
        assert outcome["dtypes"] == [f"torch.{dtype}"]
        assert outcome["bytes"] == outcome["expected bytes"] > 4 * outcome["most at a time"]
        assert outcome["nothing sent"].startswith("RuntimeError: 0 tensors missing, 0 unexpected")
        assert "1 of 32 values of model.norm.weight" in outcome["not finite"]


@pytest.mark.parametrize("axes", ["as the policy", "ulysses", "ring"])
def test_R8_a_reference_has_a_context_axis_of_its_own(two, axes):
    for found in two:
        outcome = found["reference"][axes]
        assert outcome["difference"] < 1e-5
        assert outcome["bytes"] == outcome["of"] // 2
        assert outcome["groups are known"]
        assert (outcome["groups of its own"] > 0) == (axes != "as the policy")


def test_supervised_steps_are_those_of_one_process(two):
    for found in two:
        alone, group = found["supervised"]
        for step, expected in zip(group, alone, strict=True):
            assert step == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_masters_load_and_sleep(two, axis):
    for found in two:
        outcome = found["states"][axis]
        assert outcome.pop("refused").startswith("ValueError: the checkpoint's weights are not")
        assert outcome == {"whole": True, "shards": True, "bytes asleep": 0, "same": True}


def test_gradients_and_shards_on_the_host_change_no_bit(ranks):
    """Where gradients are reduced after each micro-batch anyway; elsewhere no more than the order
    of sums over micro-batches and processes."""
    for found in ranks:
        outcome = dict(found["offloaded"])
        for name, limit in (("stage 1", 1e-6), ("copies", 1e-6)):
            for differing in outcome.pop(name, []):
                assert differing["masters"] < limit, name
        for bug in ("not clipped", "earlier passes"):
            assert all(len(d["names"]) > 5 for d in outcome.pop(bug, [])), bug
        assert {name: d for name, ds in outcome.items() for d in ds if d["names"]} == {}
        if len(ranks) == 2:
            assert len(outcome) == 7


@pytest.mark.parametrize("axis", ["data", "tensor", "moments on the host"])
def test_R25_a_checkpoint_is_read_one_tensor_at_a_time(two, axis):
    for found in two:
        outcome = found["restored"][axis]
        assert outcome["equal"]
        assert outcome["go on alike"]
        assert outcome["read"] >= outcome["of"] * 2 // 3
        assert outcome["held"] <= 1
