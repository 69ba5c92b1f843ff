"""Optimizers of two processes, each with its shards: what they compute, save and go on from.

What needs a group runs in `sharded_optimizer_ranks`, whose outcomes are judged here.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

WORLD_SIZE = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORLD_SIZE)}
    folder = tmp_path_factory.mktemp("resume")
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.sharded_optimizer_ranks", str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | common | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        outputs = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), outputs[0][1] + outputs[1][1]
    return json.loads(outputs[0][0])


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


@pytest.mark.parametrize("case", ["zero 2", "zero 2, bfloat16", "tensor"])
def test_offloaded_moments_of_all_processes_are_resumed(ranks, case):
    for found in ranks:
        assert found[case] == {
            "weights": [],
            "moments": [],
            "zeros": 0,
            "next weights": [],
            "next moments": [],
            "alone": [],
        }


def test_planted_moments_of_the_first_process_only_are_refused(ranks):
    for found in ranks:
        assert "fits no parameter" in found["planted, plain moments"]
