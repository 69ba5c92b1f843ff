"""The run itself: folder, seed, length, checkpoints, evaluation, logging."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from hone.config.base import Section
from hone.rollout.settings import FilteredSamplingConfig, GenerationConfig

__all__ = [
    "CheckpointConfig",
    "DPORunConfig",
    "EvalConfig",
    "EvaluateRunConfig",
    "EvaluationConfig",
    "GenerateRunConfig",
    "LogConfig",
    "RewardModelingRunConfig",
    "RunConfig",
    "SFTEvalConfig",
    "SFTRunConfig",
    "StandaloneEvaluationConfig",
    "Tracker",
]


Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class GenerateRunConfig(Section):
    """Seed and device."""

    seed: int = 0
    """Seed of everything random in the run."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; `auto` is CUDA where a GPU is found."""


class EvaluateRunConfig(GenerateRunConfig):
    """Folder, seed and device."""

    dir: Path = Path("runs/eval")
    """Folder that receives metrics and samples; of training also checkpoints and the report. Unset:
    `runs/` and the recipe's name, as in `runs/gsm8k`; the default is for a run without recipe."""


class RunConfig(EvaluateRunConfig):
    """Identity and length of a run."""

    dir: Path = Path("runs/rl")
    """Folder that receives metrics, samples, checkpoints and the report. Unset: `runs/` and the
    recipe's name, as in `runs/gsm8k`; the default is for a run without recipe. One that holds a run
    of another model or command is refused, and so is the recipe's own where it holds a run of
    another recipe of that name."""

    steps: int = Field(default=100, ge=1)
    """Training steps (RL: rollouts; SFT: optimizer steps)."""

    resume: Literal["auto", "never"] | int = "auto"
    """`auto` goes on from the newest complete checkpoint in `dir`, `never` refuses a folder that
    holds one, a number names a step."""


class SFTRunConfig(RunConfig):
    """Identity and length of a run."""

    dir: Path = Path("runs/sft")
    """As for `hone rl`: unset, `runs/` and the recipe's name; the default is for a run without
    recipe. One that holds a run of another model or command is refused."""


class DPORunConfig(SFTRunConfig):
    """Identity and length of a run."""

    dir: Path = Path("runs/dpo")
    """As for `hone rl`: unset, `runs/` and the recipe's name; the default is for a run without
    recipe. One that holds a run of another model or command is refused."""


class RewardModelingRunConfig(SFTRunConfig):
    """Identity and length of a run."""

    dir: Path = Path("runs/reward-model")
    """As for `hone rl`: unset, `runs/` and the recipe's name; the default is for a run without
    recipe. One that holds a run of another model or command is refused."""


class CheckpointConfig(Section):
    """When state is saved and what is kept."""

    every_n_steps: int = Field(default=50, ge=0)
    """Steps between checkpoints, the last of which follows the last step, after the model is
    written. 0: none, so that the run ends with its model alone and cannot be extended. With either,
    Ctrl-C and SIGTERM write the model, then a checkpoint if it fits."""

    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept."""

    keep_best: bool = True
    """Also save a step whose evaluation is the best so far, and keep the best of these."""

    export_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the exported Hugging Face folder; `auto` is the model's compute format."""


class SFTEvalConfig(Section):
    """When the loss on held-out rows is measured."""

    every_n_steps: int = Field(default=0, ge=0)
    """Steps between evaluations, the last of which follows the last step; 0: none but that of
    `at_start`."""

    at_start: bool = False
    """Evaluate before the first step."""

    @property
    def is_scheduled(self) -> bool:
        """Whether a run evaluates at all."""
        return self.every_n_steps > 0 or self.at_start

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether an evaluation follows `step`, of so many."""
        every = self.every_n_steps
        return every > 0 and (step % every == 0 or step == num_steps)


class EvaluationConfig(FilteredSamplingConfig):
    """How held-out prompts are sampled and judged."""

    n_samples_per_prompt: int = Field(default=1, ge=1)
    """Samples per prompt; more than 1 gives pass@k for every power of two up to it. Standard errors
    are those over prompts."""

    pass_function: str | None = None
    """Reward function, by its name in metrics (`exact_match`, `my_function`), that says whether a
    sample passes; of weight 0 it does nothing else. Unset: a sample passes where all functions of
    positive weight but `overlong` give 1, if they give nothing but 0 and 1 in the run's first
    evaluation, and each of several 1 at least once; else the run has no pass@k."""

    pass_threshold: float = 1.0
    """Score of `pass_function` from which a sample passes."""


class StandaloneEvaluationConfig(EvaluationConfig, GenerationConfig):
    """How held-out prompts are sampled and judged."""


class EvalConfig(SFTEvalConfig, EvaluationConfig):
    """Evaluation by sampling on held-out prompts, and when it takes place."""

    metric: str = "eval/reward/mean"
    """Metric that ranks checkpoints; larger is better."""


class LogConfig(Section):
    """Where metrics go, beside the console and `metrics.jsonl`."""

    to: tuple[Tracker, ...] = ("tensorboard",)
    """Who receives metrics, tables of samples and histograms: TensorBoard as files in the run
    folder, Weights & Biases, MLflow (no histograms), Trackio; each but the first needs the extra of
    its name."""

    project: str = "hone"
    """Project name at those trackers."""

    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of this machine at which `/metrics` has the newest metrics for Prometheus and `/health`
    says whether steps come as usual; 0: none. It listens at 127.0.0.1 alone, in the first process.
    """

    samples_per_step: int = Field(default=8, ge=0)
    """Samples written to `samples.jsonl` and to trackers each step, and of each evaluation, in
    whole groups, the last of which may pass this number; at least a step's samples keeps all."""
