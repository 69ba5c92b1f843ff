"""The table of combinations that rules find: a file for each of `hone.config.rules`."""

from __future__ import annotations

from tests.config.rule_rows import (
    algorithm,
    bench,
    cluster,
    critic,
    engine,
    files,
    profile,
    rewards,
    run,
    sampling,
    trainer,
)
from tests.config.rule_rows.row import Row

__all__ = ["ROWS", "Row"]

ROWS: list[Row] = [
    *files.ROWS,
    *rewards.ROWS,
    *sampling.ROWS,
    *engine.ROWS,
    *trainer.ROWS,
    *algorithm.ROWS,
    *critic.ROWS,
    *cluster.ROWS,
    *run.ROWS,
    *profile.ROWS,
    *bench.ROWS,
]
