"""Checks on the course of a run: evaluation, checkpoints, resuming."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.checks.files import check_run_dir
from hone.config.checks.finding import Finding, differs, error, warning
from hone.config.data import DataConfig
from hone.config.reward import BUILTIN_REWARDS, RewardConfig
from hone.config.run import (
    CheckpointConfig,
    EvalConfig,
    EvaluationConfig,
    RunConfig,
    SFTEvalConfig,
)

__all__ = [
    "check_checkpoints",
    "check_evaluation",
    "check_passing",
    "check_ranking",
    "check_run",
    "evaluates",
]


def evaluates(evaluation: SFTEvalConfig) -> bool:
    """Whether a run evaluates at all."""
    return bool(evaluation.every_n_steps or evaluation.at_start or evaluation.at_end)


def check_run(run: RunConfig) -> Iterator[Finding]:
    """The run folder and where to resume."""
    yield from check_run_dir(run.dir)
    if not isinstance(run.resume, int):
        return
    if run.resume < 0:
        yield error(
            f"run.resume is {run.resume}; allowed are auto, never, or the number of a step.",
            "run.resume",
        )
    elif run.resume >= run.steps:
        yield error(
            f"run.resume names step {run.resume}, but run.steps is {run.steps}: nothing is left to "
            "do. Raise run.steps, or resume from an earlier step.",
            "run.resume",
            "run.steps",
        )


def check_evaluation(
    evaluation: SFTEvalConfig, data: DataConfig, run: RunConfig
) -> Iterator[Finding]:
    """A schedule needs data, and data a schedule."""
    has_data = bool(data.eval) or data.eval_fraction > 0
    asked = differs(evaluation, "every_n_steps", "at_start", "at_end")
    if asked and not has_data:
        names = " and ".join(f"eval.{name}" for name in asked)
        yield error(
            f"{names} asks for evaluation, but there is nothing to evaluate on: data.eval is empty "
            "and data.eval_fraction is 0. Set one of the two.",
            *(f"eval.{name}" for name in asked),
            "data.eval",
            "data.eval_fraction",
        )
    if has_data and not evaluates(evaluation):
        source = "data.eval" if data.eval else "data.eval_fraction"
        yield warning(
            f"{source} sets rows aside, but nothing evaluates: eval.every_n_steps is 0 and "
            "eval.at_start and eval.at_end are off. Set one of them.",
            source,
            "eval.every_n_steps",
            "eval.at_start",
            "eval.at_end",
        )
    if evaluation.every_n_steps > run.steps:
        yield warning(
            f"eval.every_n_steps is {evaluation.every_n_steps}, more than run.steps = {run.steps}: "
            "no evaluation falls between start and end.",
            "eval.every_n_steps",
            "run.steps",
        )


def check_ranking(evaluation: EvalConfig) -> Iterator[Finding]:
    """The metric that ranks checkpoints."""
    if not evaluation.metric.startswith("eval/"):
        yield error(
            f"eval.metric is '{evaluation.metric}'; metrics of an evaluation begin with 'eval/', "
            "for example eval/reward/mean.",
            "eval.metric",
        )


def check_passing(evaluation: EvaluationConfig, reward: RewardConfig) -> Iterator[Finding]:
    """Whether the function that lets samples pass exists, and whether any sample can."""
    name, threshold = evaluation.pass_function, evaluation.pass_threshold
    if name is None:
        if differs(evaluation, "pass_threshold"):
            yield warning(
                f"eval.pass_threshold is {threshold:g}, but eval.pass_function is not set, so it "
                "is not used: name the reward function whose score it is for "
                f"({', '.join(reward.names)}), or remove it.",
                "eval.pass_threshold",
                "eval.pass_function",
            )
        return
    if name not in reward.names:
        yield error(
            f"eval.pass_function is '{name}', but reward.functions has "
            f"{', '.join(reward.names) or 'none'}. Name one of them.",
            "eval.pass_function",
            "reward.functions",
        )
        return
    fn = reward.functions[reward.names.index(name)].fn
    highest = 0.0 if fn == "overlong" else 1.0
    if fn in BUILTIN_REWARDS and highest < threshold:
        yield warning(
            f"eval.pass_threshold is {threshold:g}, but eval.pass_function {name} gives at most "
            f"{highest:g}: no sample can pass. Lower eval.pass_threshold.",
            "eval.pass_threshold",
            "eval.pass_function",
        )


def check_checkpoints(checkpoint: CheckpointConfig, run: RunConfig) -> Iterator[Finding]:
    """When state is saved."""
    if checkpoint.every_n_steps > run.steps and differs(checkpoint, "every_n_steps"):
        yield warning(
            f"checkpoint.every_n_steps is {checkpoint.every_n_steps}, more than run.steps = "
            f"{run.steps}: only the end is saved, and a crash loses everything.",
            "checkpoint.every_n_steps",
            "run.steps",
        )
