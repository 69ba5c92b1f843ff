"""Pipeline stages over processes of gloo against one process alone; see `pipeline_ranks.py`."""

from __future__ import annotations

from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from hone.distributed.mesh import Mesh
from hone.distributed.settings import AxisSizes, ParallelConfig
from hone.errors import UserError
from hone.families.shape import ModelShape
from hone.families.stages import stage_layers
from hone.models.decoder import decoder_layers
from hone.trainer.pipeline import cut_stage
from tests.rank_cases import check_cases, check_go_on
from tests.ranks import parts_of, run_ranks
from tests.trainer.examples import tiny_model
from tests.trainer.pipeline_ranks import (
    BFLOAT16,
    BUGS,
    CUT_OTHERWISE,
    LAYOUTS,
    MEASURES,
    MODEL,
    cases,
    round_trips,
    value_model,
)

EXACT = 1e-5
# A move divides by the root of a small second moment, which a rounding changes.
LIMITS = dict.fromkeys(MEASURES, EXACT) | {"weights": 5 * EXACT}
WORLDS = [2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def ranks():
    found = {}

    def of(world):
        if world not in found:
            found[world] = parts_of(run_ranks("tests.trainer.pipeline_ranks", world))
        return found[world]

    return of


@pytest.mark.parametrize("world", WORLDS)
def test_R8_training_is_that_of_one_process(ranks, world):
    check_cases(ranks(world), "layouts", cases(world), LIMITS)


def test_R8_in_bfloat16_only_sums_are_rounded_otherwise(ranks):
    measures = ("logprobs", "loss", "gradient", "masters")
    check_cases(ranks(2), "bfloat16", BFLOAT16, dict.fromkeys(measures, EXACT))


@pytest.mark.parametrize("world", WORLDS)
def test_supervised_metrics_are_those_of_one_process(ranks, world):
    for rank in ranks(world):
        alone, staged = rank["supervised"]
        for one, other in zip(alone, staged, strict=True):
            assert other == pytest.approx(one, rel=EXACT)


@pytest.mark.parametrize("world", WORLDS)
def test_scores_without_gradient_are_those_of_one_process(ranks, world):
    for rank in ranks(world):
        for output, (worst, has_same_dtype) in rank["scores"].items():
            assert worst < EXACT, output
            assert has_same_dtype, output


@pytest.mark.parametrize("world", WORLDS)
def test_passes_follow_each_other_as_1F1B_has_it(ranks, world):
    orders = {0: "FFBFBFBb", 1: "FBFBFBFb"}
    for number, rank in enumerate(ranks(world)):
        assert rank["in_flight"] == orders[number // (world // 2)]


@pytest.mark.parametrize("world", WORLDS)
def test_each_stage_holds_its_layers(ranks, world):
    shape = ModelShape.from_config(tiny_model(**MODEL).config.to_dict())
    for number, rank in enumerate(ranks(world)):
        for layout, (names, share) in rank["parts_held"].items():
            sizes = AxisSizes.of(ParallelConfig(**LAYOUTS[world][layout]), world)
            stage = number // (world // sizes.pipeline)
            own = chain(*stage_layers(shape, sizes.pipeline, sizes.virtual_stages)[stage])
            held = {int(name.split(".")[2]) for name in names if ".layers." in name}
            assert held == set(own), layout
            is_end = stage in {0, sizes.pipeline - 1}
            assert ("model.embed_tokens.weight" in names) == is_end, "tied: on both ends"
            assert ("model.norm.weight" in names) == (stage == sizes.pipeline - 1)
            of_one = 1 / (sizes.fsdp * sizes.tensor)
            assert share == pytest.approx(of_one, abs=0.05), layout


@pytest.mark.parametrize("world", WORLDS)
def test_a_run_goes_on_in_another_number_of_stages(ranks, world):
    check_go_on(ranks(world), "round_trip", round_trips(world), EXACT)
    assert not any(rank["round_trip"][CUT_OTHERWISE]["held alike"] for rank in ranks(world))


@pytest.mark.parametrize("world", WORLDS)
def test_R2_weights_of_all_stages_arrive_and_are_exported(ranks, world):
    for rank in ranks(world):
        for name, found in rank["delivered"].items():
            assert found["names"], name
            assert found["version"] == 3
            assert found["engine"] < EXACT, (name, found)
            assert found["exported"] < EXACT, (name, found)
            assert found["asleep"], name


@pytest.mark.parametrize("world", WORLDS)
def test_a_stage_reads_its_own_weights_alone(ranks, world):
    for rank in ranks(world):
        assert rank["deferred"] == {"read": True, "equal": True}


def test_R8_planted_bugs_are_caught(ranks):
    assert ranks(2)[0]["planted"].keys() == BUGS.keys()
    for bug, worst in ranks(2)[0]["planted"].items():
        assert (worst < 5 * EXACT) == (bug == "nothing"), (bug, worst)


def test_layers_are_cut_as_planned_with_and_without_a_head():
    """Of five the head makes the last stage have two; a critic has none."""
    for make, sizes in ((partial(tiny_model, **MODEL), [3, 2]), (value_model, [2, 3])):
        for rank, size in enumerate(sizes):
            model, axis = make(), SimpleNamespace(rank=rank, size=2)
            mesh = SimpleNamespace(pipeline=axis, sizes=AxisSizes(pipeline=2))
            cut_stage(model, cast("Mesh", mesh))
            assert len(decoder_layers(model)) == size


def test_one_stage_leaves_the_model_as_it_is():
    model = tiny_model(**MODEL)
    parameters = dict(model.named_parameters())
    cut_stage(model, Mesh.alone(torch.device("cpu")))
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert len(decoder_layers(model)) == MODEL["num_hidden_layers"]


def test_a_number_that_does_not_divide_is_told():
    with pytest.raises(UserError, match=r"trainer\.parallel\.pipeline_parallel_size 3"):
        AxisSizes.of(ParallelConfig(pipeline_parallel_size=3), 4)
