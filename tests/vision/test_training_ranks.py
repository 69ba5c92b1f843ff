"""Several processes train on rows with images what one does; see `training_ranks.py`."""

from __future__ import annotations

import pytest

from tests.rank_cases import check_cases
from tests.ranks import parts_of, run_ranks
from tests.vision.training_ranks import CASES

LIMITS = {"logprobs": 1e-5, "loss": 1e-5, "gradient": 1e-4, "metrics": 1e-3, "weights": 1e-3}


@pytest.fixture(scope="module")
def ranks():
    """What each rank found."""
    return parts_of(run_ranks("tests.vision.training_ranks", 2))


def test_layouts_train_what_one_process_does(ranks):
    check_cases(ranks, "layouts", CASES, LIMITS)


def test_forgotten_images_are_seen(ranks):
    assert ranks[0]["mistakes"]["images left out"]["logprobs"] > 1e-2
