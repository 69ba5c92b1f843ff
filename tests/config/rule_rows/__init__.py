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

__all__ = ["BY_TOPIC", "ROWS", "Row"]

BY_TOPIC: dict[str, list[Row]] = {
    topic.__name__.rpartition(".")[2]: topic.ROWS
    for topic in (
        files,
        rewards,
        sampling,
        engine,
        trainer,
        algorithm,
        critic,
        cluster,
        run,
        profile,
        bench,
    )
}
ROWS: list[Row] = [row for rows in BY_TOPIC.values() for row in rows]
