"""Launches of several processes: what they are given, and how they end."""

from __future__ import annotations

import json
import os
import threading

import pytest

from tests.ranks import run_ranks

NAME = "HONE_TEST_OF_RANKS"


def main(what: str) -> None:
    """What the ranks of these tests do."""
    if what == "fails" and os.environ["RANK"] == "1":
        raise ValueError("rank 1 has a mistake")
    if what != "shows":
        threading.Event().wait()
    if os.environ["RANK"] == "0":
        names = (NAME, "WORLD_SIZE", "OMP_NUM_THREADS")
        print(json.dumps([os.environ.get(name) for name in names]))  # noqa: T201


@pytest.mark.parametrize("is_warm", [True, False])
def test_ranks_have_the_environment_of_the_test(monkeypatch, is_warm):
    for value in ("first", "second"):
        monkeypatch.setenv(NAME, value)
        assert run_ranks(__name__, 2, "shows", is_warm=is_warm) == [value, "2", "1"]


def test_a_rank_that_fails_ends_the_others_and_is_shown():
    with pytest.raises(AssertionError, match="ValueError: rank 1 has a mistake"):
        run_ranks(__name__, 2, "fails")


def test_a_launch_that_hangs_is_ended():
    with pytest.raises(AssertionError, match="It has not ended within"):
        run_ranks(__name__, 2, "hangs", timeout_s=0.5)


def test_a_launch_is_a_child_whose_cpu_time_is_counted():
    before = os.times()
    run_ranks(__name__, 1, "shows")
    after = os.times()
    assert after.children_user + after.children_system > before.children_user
