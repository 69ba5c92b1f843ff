"""The table of combinations that rules find: a file for each topic of `hone.rules`."""

from __future__ import annotations

from hone.engine.settings import BackendName
from tests.config.rule_rows import (
    algorithm,
    bench,
    cluster,
    critic,
    engine,
    files,
    mixing,
    profile,
    rewards,
    run,
    sampling,
    sglang,
    tools,
    trainer,
    vllm,
)
from tests.config.rule_rows.row import Row

__all__ = ["BY_BACKEND", "BY_TOPIC", "ROWS", "Row"]

BY_TOPIC: dict[str, list[Row]] = {
    topic.__name__.rpartition(".")[2]: topic.ROWS
    for topic in (
        files,
        mixing,
        rewards,
        tools,
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
BY_BACKEND: dict[BackendName, list[Row]] = {"vllm": vllm.ROWS, "sglang": sglang.ROWS}
"""Those of engines that are not built in, by `engine.backend`."""
ROWS: list[Row] = [row for rows in (*BY_TOPIC.values(), *BY_BACKEND.values()) for row in rows]
