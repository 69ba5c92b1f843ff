"""The table of the walk: each key of each tree, and what it changes."""

from __future__ import annotations

from tests.config.walk import Row
from tests.config.walk_rows.bench import BENCH_ENGINE, BENCH_TRAIN
from tests.config.walk_rows.inference import EVALUATE, GENERATE
from tests.config.walk_rows.rl import RL
from tests.config.walk_rows.serving import SERVE
from tests.config.walk_rows.simulated import NOT_OF_TIME, SIMULATE
from tests.config.walk_rows.training import DPO, REWARD_MODEL, SFT

__all__ = ["NOT_OF_TIME", "ROWS"]

ROWS: dict[str, dict[str, Row]] = {
    "rl": RL,
    "sft": SFT,
    "dpo": DPO,
    "reward-model": REWARD_MODEL,
    "eval": EVALUATE,
    "generate": GENERATE,
    "serve": SERVE,
    "bench engine": BENCH_ENGINE,
    "bench train": BENCH_TRAIN,
    "plan": SIMULATE,
}
