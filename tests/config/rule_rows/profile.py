"""Combinations that the rules on traces find."""

from __future__ import annotations

from tests.config.rule_rows.row import Row

ROWS: list[Row] = [
    # traces
    ("sft", "profile.memory.recorder=torch run.device=cpu", "error", "profile.memory.recorder"),
    ("rl", "profile.memory.after_steps=2", "warning",
     "profile.memory.after_steps profile.memory.recorder"),
    ("rl", "profile.rollout.steps=[1] profile.rollout.activities=[gpu] run.device=cpu", "error",
     "profile.rollout.activities"),
    ("sft", "profile.train.steps=[3] run.steps=3", "warning", "profile.train.steps run.steps"),
    ("rl", "profile.rollout.steps=[3] run.steps=3", "warning", "profile.rollout.steps run.steps"),
    ("sft", "profile.train.steps=[0] profile.train.with_stack=true", "warning",
     "profile.train.with_stack"),
    ("sft", "profile.train.steps=[0] profile.train.with_memory=true", "warning",
     "profile.train.with_memory"),
    ("rl", "profile.rollout.steps=[0] profile.rollout.with_stack=true", "warning",
     "profile.rollout.with_stack"),
    ("sft", "profile.train.with_flops=true", "warning",
     "profile.train.with_flops profile.train.steps"),
    ("rl", "profile.rollout.by_stage=true", "warning",
     "profile.rollout.by_stage profile.rollout.steps"),
]  # fmt: skip
