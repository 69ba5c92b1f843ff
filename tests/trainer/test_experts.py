"""Expert parallelism over processes of gloo against one process alone; see `expert_ranks.py`."""

from __future__ import annotations

import pytest
import torch

from hone.distributed.mesh import Mesh
from hone.distributed.settings import AxisSizes, ParallelConfig
from hone.errors import UserError
from hone.trainer.experts import divide_experts
from tests.rank_cases import check_cases, check_go_on
from tests.ranks import parts_of, run_ranks
from tests.tables import check_rows
from tests.trainer.examples import tiny_model
from tests.trainer.expert_ranks import (
    BUGS,
    BUGS_OF_STAGES,
    LAYOUTS,
    MODEL,
    ROUTES,
    cases,
    round_trips,
)

EXACT = 1e-5
LIMITS = dict.fromkeys(("logprobs", "loss", "gradient", "metrics"), EXACT)
# Adam divides by moments: where they are near zero a move shows more than a gradient.
LIMITS |= dict.fromkeys(("weights", "masters"), 5 * EXACT)


@pytest.fixture(scope="module")
def ranks():
    found = {}

    def of(world):
        if world not in found:
            found[world] = parts_of(run_ranks("tests.trainer.expert_ranks", world))
        return found[world]

    return of


WORLDS = [2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.mark.parametrize("world", WORLDS)
def test_R8_a_divided_layer_is_the_loop_over_experts(ranks, world):
    def check(name):
        for rank in ranks(world):
            assert max(rank["layers"][name].values()) < EXACT, rank["layers"][name]

    check_rows([name + kind for name in ROUTES for kind in ("", ", adapted")], check)


@pytest.mark.parametrize("world", WORLDS)
def test_R8_training_is_that_of_one_process(ranks, world):
    check_cases(ranks(world), "layouts", cases(world), LIMITS)


@pytest.mark.parametrize("world", WORLDS)
def test_each_rank_holds_its_share(ranks, world):
    for rank in ranks(world):
        for name, (of_experts, of_others) in rank["parts_held"].items():
            cfg = ParallelConfig(**LAYOUTS[world][name])
            sizes = AxisSizes.of(cfg, world)
            assert of_experts == pytest.approx(1 / sizes.expert / sizes.expert_fsdp), name
            assert of_others == pytest.approx(1 / sizes.fsdp / sizes.tensor, abs=0.05), name


@pytest.mark.parametrize("world", WORLDS)
def test_a_run_goes_on_with_experts_divided_otherwise(ranks, world):
    check_go_on(ranks(world), "round_trip", round_trips(world), EXACT)


def caught(found, bugs):
    """Whether a comparison has seen each of them, and nothing where there is none."""
    assert found.keys() == bugs.keys()
    return {bug for bug, worst in found.items() if not worst < EXACT} == bugs.keys() - {"nothing"}


def test_R8_planted_bugs_are_caught(ranks):
    assert caught(ranks(2)[0]["planted"], BUGS), ranks(2)[0]["planted"]


@pytest.mark.slow
def test_R8_planted_bugs_of_experts_in_stages_are_caught(ranks):
    found = ranks(4)[0]["planted_of_stages"]
    assert caught(found, BUGS_OF_STAGES), found


def test_one_rank_leaves_the_model_as_it_is():
    model = tiny_model(**MODEL)
    parameters = dict(model.named_parameters())
    divide_experts(model, Mesh.alone(torch.device("cpu")))
    assert all(p is parameters[name] for name, p in model.named_parameters())


@pytest.mark.parametrize(
    ("fields", "world"),
    [({"expert_parallel_size": 3}, 4), ({"expert_parallel_size": 2, "fsdp_size": 3}, 6)],
)
def test_sizes_that_do_not_divide_are_told(fields, world):
    with pytest.raises(UserError, match=r"trainer\.parallel\.expert_parallel_size is"):
        AxisSizes.of(ParallelConfig(**fields), world)
