"""Combinations that the rules on a run find."""

from __future__ import annotations

from tests.config.rule_rows.row import Row

ROWS: list[Row] = [
    # a reward model
    ("eval", "reward.model.path=judge eval.pass_function=exact_match", "error",
     "eval.pass_function reward.functions"),
    ("eval", "eval.pass_threshold=2", "warning", "eval.pass_threshold eval.pass_function"),
    (
        "eval",
        "eval.pass_threshold=2 eval.pass_function=exact_match",
        "warning",
        "eval.pass_threshold eval.pass_function",
    ),
    (
        "eval",
        "eval.pass_function=exact_macht",
        "error",
        "eval.pass_function reward.functions",
    ),
    ("eval", "reward.functions.0.fn=judge", "warning", "eval.pass_function"),
    ("eval", "reward.functions.0.weight=0 reward.model.path=judge", "warning",
     "eval.pass_function"),
    ("rl", "data.eval_fraction=0.1 eval.every_n_steps=10 reward.functions.0.fn=code_tests "
     'reward.functions.0.args={"partial_credit":true}', "warning", "eval.pass_function"),
    # files
    ("rl", "log.to=[mlflow]", "error", "log.to"),
    # the course of a run
    ("rl", "eval.every_n_steps=5", "error", "eval.every_n_steps data.eval data.eval_fraction"),
    ("sft", "eval.every_n_steps=100", "error", "eval.every_n_steps data.eval data.eval_fraction"),
    ("rl", "data.eval_fraction=0.1", "warning", "data.eval_fraction eval.every_n_steps"),
    ("rl", "data.eval_fraction=0.1 eval.every_n_steps=100 eval.metric=reward/mean", "error",
     "eval.metric"),
    ("sft", "checkpoint.every_n_steps=200", "warning", "checkpoint.every_n_steps run.steps"),
    ("rl", "checkpoint.every_n_steps=200", "warning", "checkpoint.every_n_steps run.steps"),
    ("rl", "run.resume=-1", "error", "run.resume"),
    ("rl", "run.resume=100", "error", "run.resume run.steps"),
    ("rl", "data.eval.0.path=other.jsonl", "warning", "data.eval eval.every_n_steps"),
    ("sft", "log.samples_per_step=4", "warning", "log.samples_per_step"),
]  # fmt: skip
