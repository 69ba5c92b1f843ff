"""Optimizers of two processes, each with its shards: what they compute.

What needs a group runs in `sharded_optimizer_ranks`, whose outcomes are judged here.
"""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks

WORLD_SIZE = 2


@pytest.fixture(scope="module")
def ranks():
    """What each rank found."""
    return run_ranks("tests.trainer.sharded_optimizer_ranks", WORLD_SIZE)


def test_bfloat16_moments_do_not_depend_on_the_sharding(ranks):
    for found in ranks:
        assert len(found["layouts"]) == 16
        assert all(wrong == [] for wrong in found["layouts"].values()), found["layouts"]


def test_planted_noise_that_starts_again_in_every_shard_is_caught(ranks):
    for found in ranks:
        planted = found["planted, every shard from 0"]
        for layout in ("2 x 1, rows", "1 x 2, columns", "2 x 1, both", "1 x 2, both"):
            for place in ("device", "host"):
                assert "exp_avg/even" in planted[f"{layout}, {place}"]
