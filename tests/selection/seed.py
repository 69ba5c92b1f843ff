"""What the random draws of a run of the suite follow from."""

from __future__ import annotations

import pytest

SEED = pytest.StashKey[int]()


def seed_of(config: pytest.Config) -> int:
    """The seed of the suite; `tests/conftest.py` makes that of each test from it."""
    return config.stash[SEED]
