"""Tensor parallelism over processes of gloo against one process alone; see `tensor_ranks.py`."""

from __future__ import annotations

import pytest
import torch

from hone.distributed.mesh import Mesh
from hone.trainer.row_shares import first_row
from hone.trainer.tensor import parallelize
from tests.ranks import Parts, parts_of, run_ranks
from tests.tables import check_rows
from tests.trainer.examples import tiny_model
from tests.trainer.tensor_ranks import ADAPTED, BUGS, STEPS

RANKS = "tests.trainer.tensor_ranks"
VALUES, GRADIENTS = 1e-5, 1e-4


@pytest.fixture(scope="module")
def two() -> list[Parts]:
    return parts_of(run_ranks(RANKS, 2))


def test_R8_numbers_are_those_of_one_process(two):
    def check(case):
        for found in (rank["steps"][case] for rank in two):
            assert found["values"] < VALUES
            assert found["values without gradient"] < VALUES
            assert found["gradients"] < GRADIENTS
            assert found["likeliest"]
            assert found["equal on all ranks"]
            assert found["largest part"] < 0.52, "every matrix is split"

    check_rows(STEPS.keys(), check)


def test_R8_adapters_have_the_numbers_of_one_process(two):
    def check(case):
        for found in (rank["adapted"][case] for rank in two):
            assert found["values"] < VALUES
            assert found["values without gradient"] < VALUES
            assert found["gradients"] < GRADIENTS
            assert found["equal on all ranks"]
            assert found["largest part"] < 0.52, "every frozen matrix is split"
            assert found["reference"] < VALUES

    check_rows(ADAPTED, check)


def test_frozen_parameters_stay_frozen(two):
    assert two[0]["frozen"]["trained"] == ["model.layers.0.self_attn.q_proj.weight"]


def test_R8_planted_bugs_are_caught(two):
    def check(bug):
        found = two[0]["planted"][bug]
        is_right = found["values"] < VALUES and found["gradients"] < GRADIENTS
        assert is_right == (bug == "nothing"), found

    check_rows(BUGS.keys(), check)


@pytest.mark.slow
def test_R8_together_with_shards_over_data():
    for rank in parts_of(run_ranks(RANKS, 4)):
        assert len(rank["shards"]) == 10
        for found in rank["shards"].values():
            assert found["values"] < VALUES
            assert found["gradients"] < GRADIENTS
            assert found["meshes"] == ["('shard', 'tensor')"]


def test_one_rank_leaves_the_model_as_it_is():
    model = tiny_model()
    parameters = dict(model.named_parameters())
    parallelize(model, Mesh.alone("cpu"))
    assert all(p is parameters[name] for name, p in model.named_parameters())


@pytest.mark.parametrize(("num_rows", "size"), [(8, 2), (51, 2), (10, 4), (3, 4)])
def test_rows_are_split_as_torch_splits_them(num_rows, size):
    parts = torch.arange(num_rows).chunk(size)
    firsts = [first_row(num_rows, rank, size) for rank in range(size)]
    assert firsts[: len(parts)] == [int(part[0]) for part in parts]
    assert set(firsts[len(parts) :]) <= {num_rows}
