"""Whole runs of `hone rl` with random tiny hybrid models, which a training in float64 by plain
transformers repeats: three steps of any algorithm, with episodes of one and of several turns.

`python -m tests.recurrent.drawn_runs 0 50` says more of each seed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recurrent.drawn_runs import LIMITS, replayed

QUICK = (7, 8)
"""Seeds with one turn an episode, and with several. Together they have cached and preempted
prompts, samples that were carried over to the next step, several optimizer steps a rollout, tokens
that are clipped, and a divergence in the reward."""
SEEDS = range(50)
WITHOUT_UPDATE = {18}
"""Seeds whose runs are left with a few tokens of samples with equal rewards, so that no weight
changes."""


def check(seed: int, folder: Path) -> None:
    found = replayed(seed, folder)
    assert found.num_tokens > 0
    assert (found.moved > 0) == (seed not in WITHOUT_UPDATE)
    assert {"weights", "moments", "engine", "trainer", "loss"} <= found.largest.keys()
    for kind, error in found.largest.items():
        assert error < LIMITS[kind], f"{kind}: {error:.1e} in {found.where[kind]}"


@pytest.mark.parametrize("seed", QUICK)
def test_a_run_is_its_replay(tmp_path: Path, seed: int) -> None:
    check(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", sorted({*SEEDS} - {*QUICK}))
def test_random_runs_are_their_replays(tmp_path: Path, seed: int) -> None:
    check(seed, tmp_path)
