"""The trees that recipes fill, one a command."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from hone.config.algorithm import AlgorithmConfig
from hone.config.base import Section
from hone.config.data import DataConfig, SourceConfig
from hone.config.engine import EngineConfig
from hone.config.model import ModelConfig
from hone.config.reward import RewardConfig
from hone.config.rollout import GenerationConfig, RolloutConfig
from hone.config.run import (
    CheckpointConfig,
    EvalConfig,
    EvaluateRunConfig,
    EvaluationConfig,
    GenerateRunConfig,
    LogConfig,
    RunConfig,
    SFTEvalConfig,
)
from hone.config.trainer import SFTTrainerConfig, TrainerConfig

__all__ = [
    "EvaluateConfig",
    "EvaluateDataConfig",
    "GenerateConfig",
    "RLConfig",
    "SFTConfig",
    "SFTDataConfig",
]


class RLConfig(Section):
    """`hone rl`: reinforcement learning with verifiable rewards."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()


class SFTDataConfig(DataConfig):
    """Data of supervised fine-tuning: rows with a demonstration."""

    max_tokens: int = Field(default=2048, ge=2)
    """Longest prompt plus completion, in tokens; longer rows follow `overlong_prompts`."""

    examples_per_step: int = Field(default=64, ge=1)
    """Rows per optimizer step, over all devices."""

    train_on_prompt: bool = False
    """Also learn the prompt's tokens; off: the completion's only."""


class SFTConfig(Section):
    """`hone sft`: supervised fine-tuning on demonstrations."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: SFTDataConfig
    trainer: SFTTrainerConfig = SFTTrainerConfig()
    eval: SFTEvalConfig = SFTEvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()


class EvaluateDataConfig(DataConfig):
    """Data of `hone eval`."""

    train: tuple[SourceConfig, ...] = ()
    """Sources that `eval_fraction` holds rows out of, where `eval` is empty."""


class EvaluateConfig(Section):
    """`hone eval`: score a model on a data set."""

    run: EvaluateRunConfig = EvaluateRunConfig()
    model: ModelConfig
    data: EvaluateDataConfig
    engine: EngineConfig = EngineConfig()
    reward: RewardConfig = RewardConfig()
    eval: EvaluationConfig = EvaluationConfig()


class GenerateConfig(Section):
    """`hone generate`: sample completions for prompts from a file."""

    run: GenerateRunConfig = GenerateRunConfig()
    model: ModelConfig
    data: DataConfig
    engine: EngineConfig = EngineConfig()
    generation: GenerationConfig = GenerationConfig()
    n_samples_per_prompt: int = Field(default=1, ge=1)
    """Samples drawn for each prompt."""
    output: Path = Path("completions.jsonl")
    """JSONL file that receives one row a sample."""
