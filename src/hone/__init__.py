"""hone: post-training of language models by reinforcement learning.

    import hone

    def correct(completion: str, answer: str) -> float:
        return float(completion.strip() == answer)

    result = hone.rl("mine.yaml", reward=correct, run={"steps": 100})
    result.metrics[-1]["reward/mean"]

`rl`, `sft`, `dpo`, `reward_model`, `evaluate`, `generate` and `check` are the commands of the
command line, in this process. The parts that they are made of, such as `Trainer`, `Engine` and
`WeightSync`, are for loops of your own: `examples/loop.py` is one. What a user can get wrong raises
`UserError`. Nothing heavy is loaded before it is needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hone.version import __version__

if TYPE_CHECKING:
    from hone.algorithms.grpo import GRPO
    from hone.algorithms.ppo import PPO
    from hone.algorithms.preferences.dpo import DPO
    from hone.api import (
        Check,
        DPOConfig,
        EvaluateConfig,
        Evaluation,
        GenerateConfig,
        RewardModelingConfig,
        RLConfig,
        RunResult,
        SampleRecord,
        SFTConfig,
        UserError,
        check,
        dpo,
        evaluate,
        generate,
        reward_model,
        rl,
        sft,
    )
    from hone.config.algorithm import AlgorithmConfig, CriticConfig
    from hone.config.data import DataConfig, SourceConfig
    from hone.config.engine import EngineConfig
    from hone.config.model import ModelConfig
    from hone.config.preference import PreferenceConfig
    from hone.config.reward import RewardConfig, RewardFunctionConfig
    from hone.config.rollout import RolloutConfig
    from hone.config.run import EvaluationConfig
    from hone.config.trainer import OptimizerConfig, TrainerConfig
    from hone.data.prompts import load_prompts
    from hone.engine.engine import EmbeddedEngine as Engine
    from hone.models.decoder import alias_module
    from hone.models.load import load_model
    from hone.models.support import eos_token_ids
    from hone.models.tokenizer import decoder, load_tokenizer
    from hone.observe.metrics import to_scalars
    from hone.rewards.scorer import Scorer
    from hone.rollout.collector import Collector
    from hone.trainer.trainer import Trainer
    from hone.types import (
        Column,
        Completion,
        Group,
        Preference,
        Prompt,
        Request,
        Reward,
        Row,
        Sample,
        SamplingParams,
    )
    from hone.weights.sync import WeightSync

_PARTS = {
    "AlgorithmConfig": "hone.config.algorithm",
    "Collector": "hone.rollout.collector",
    "Column": "hone.types",
    "Completion": "hone.types",
    "CriticConfig": "hone.config.algorithm",
    "DPO": "hone.algorithms.preferences.dpo",
    "DataConfig": "hone.config.data",
    "Engine": "hone.engine.engine:EmbeddedEngine",
    "EngineConfig": "hone.config.engine",
    "EvaluationConfig": "hone.config.run",
    "GRPO": "hone.algorithms.grpo",
    "Group": "hone.types",
    "ModelConfig": "hone.config.model",
    "OptimizerConfig": "hone.config.trainer",
    "PPO": "hone.algorithms.ppo",
    "Preference": "hone.types",
    "PreferenceConfig": "hone.config.preference",
    "Prompt": "hone.types",
    "Request": "hone.types",
    "Reward": "hone.types",
    "RewardConfig": "hone.config.reward",
    "RewardFunctionConfig": "hone.config.reward",
    "RolloutConfig": "hone.config.rollout",
    "Row": "hone.types",
    "Sample": "hone.types",
    "SamplingParams": "hone.types",
    "Scorer": "hone.rewards.scorer",
    "SourceConfig": "hone.config.data",
    "Trainer": "hone.trainer.trainer",
    "TrainerConfig": "hone.config.trainer",
    "WeightSync": "hone.weights.sync",
    "alias_module": "hone.models.decoder",
    "decoder": "hone.models.tokenizer",
    "eos_token_ids": "hone.models.support",
    "load_model": "hone.models.load",
    "load_prompts": "hone.data.prompts",
    "load_tokenizer": "hone.models.tokenizer",
    "to_scalars": "hone.observe.metrics",
}
"""Where the parts are, by public name; with `:NAME` where that is another name. All other public
names are those of `hone.api`, which loads the command line."""

__all__ = [
    "DPO",
    "GRPO",
    "PPO",
    "AlgorithmConfig",
    "Check",
    "Collector",
    "Column",
    "Completion",
    "CriticConfig",
    "DPOConfig",
    "DataConfig",
    "Engine",
    "EngineConfig",
    "EvaluateConfig",
    "Evaluation",
    "EvaluationConfig",
    "GenerateConfig",
    "Group",
    "ModelConfig",
    "OptimizerConfig",
    "Preference",
    "PreferenceConfig",
    "Prompt",
    "RLConfig",
    "Request",
    "Reward",
    "RewardConfig",
    "RewardFunctionConfig",
    "RewardModelingConfig",
    "RolloutConfig",
    "Row",
    "RunResult",
    "SFTConfig",
    "Sample",
    "SampleRecord",
    "SamplingParams",
    "Scorer",
    "SourceConfig",
    "Trainer",
    "TrainerConfig",
    "UserError",
    "WeightSync",
    "__version__",
    "alias_module",
    "check",
    "decoder",
    "dpo",
    "eos_token_ids",
    "evaluate",
    "generate",
    "load_model",
    "load_prompts",
    "load_tokenizer",
    "reward_model",
    "rl",
    "sft",
    "to_scalars",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hone' has no attribute '{name}'")
    module, _, attribute = _PARTS.get(name, "hone.api").partition(":")
    return getattr(import_module(module), attribute or name)


def __dir__() -> list[str]:
    return __all__
