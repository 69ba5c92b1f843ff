"""Combinations that the rules on steps and epochs of sources find."""

from __future__ import annotations

from tests.config.rule_rows.row import Row

_SECOND = "data.train.1.path=rows.jsonl"

ROWS: list[Row] = [
    *[(command, f"data.train.0.{limit}", "error", "data.train")
      for command in ("rl", "sft", "dpo", "reward-model")
      for limit in ("max_epochs=1", "until_step=9", "from_step=2")],
    ("rl", f"{_SECOND} data.train.0.max_epochs=1 data.train.1.until_step=9", "error", "data.train"),
    ("rl", f"{_SECOND} data.train.0.until_step=4 data.train.1.from_step=6", "error", "data.train"),
    ("rl", f"{_SECOND} data.train.0.from_step=5 data.train.0.until_step=4", "error",
     "data.train.0.from_step data.train.0.until_step"),
    ("rl", f"{_SECOND} data.train.0.from_step=999999", "warning",
     "data.train.0.from_step run.steps"),
]  # fmt: skip
