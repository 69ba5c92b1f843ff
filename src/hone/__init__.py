"""hone: post-training of language models by reinforcement learning.

    import hone

    def correct(completion: str, answer: str) -> float:
        return float(completion.strip() == answer)

    result = hone.rl("mine.yaml", reward=correct, run={"steps": 100})
    result.metrics[-1]["reward/mean"]

`rl`, `sft`, `dpo`, `reward_model`, `evaluate`, `generate` and `check` run the commands of the
command line in this process, and `data_show`, `data_stats` and `data_check` look at data. Their
components, such as `Trainer`, `Engine` and `WeightSync`, are
for your own loops: `examples/loop.py` is one. Mistakes of the user raise `UserError`. Large
libraries are loaded only when they are needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hone.version import __version__

if TYPE_CHECKING:
    from hone.algorithms.grpo import GRPO
    from hone.algorithms.ppo import PPO
    from hone.algorithms.preferences.dpo import DPO
    from hone.algorithms.settings import AlgorithmConfig, CriticConfig, PreferenceConfig
    from hone.api import (
        Check,
        DataPage,
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
        data_check,
        data_show,
        data_stats,
        dpo,
        evaluate,
        generate,
        reward_model,
        rl,
        sft,
    )
    from hone.config.run import EvaluationConfig
    from hone.data.prompts import load_prompts
    from hone.data.settings import DataConfig, SourceConfig
    from hone.engine.engine import EmbeddedEngine as Engine
    from hone.engine.settings import EngineConfig
    from hone.models.decoder import alias_module
    from hone.models.load import load_model
    from hone.models.settings import ModelConfig
    from hone.models.support import eos_token_ids
    from hone.models.tokenizer import decoder, load_tokenizer
    from hone.observe.metrics import to_scalars
    from hone.rewards.scorer import Scorer
    from hone.rewards.settings import RewardConfig, RewardFunctionConfig
    from hone.rollout.collector import Collector
    from hone.rollout.settings import RolloutConfig
    from hone.trainer.settings import OptimizerConfig, TrainerConfig
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
    "AlgorithmConfig": "hone.algorithms.settings",
    "Collector": "hone.rollout.collector",
    "Column": "hone.types",
    "Completion": "hone.types",
    "CriticConfig": "hone.algorithms.settings",
    "DPO": "hone.algorithms.preferences.dpo",
    "DataConfig": "hone.data.settings",
    "Engine": "hone.engine.engine:EmbeddedEngine",
    "EngineConfig": "hone.engine.settings",
    "EvaluationConfig": "hone.config.run",
    "GRPO": "hone.algorithms.grpo",
    "Group": "hone.types",
    "ModelConfig": "hone.models.settings",
    "OptimizerConfig": "hone.trainer.settings",
    "PPO": "hone.algorithms.ppo",
    "Preference": "hone.types",
    "PreferenceConfig": "hone.algorithms.settings",
    "Prompt": "hone.types",
    "Request": "hone.types",
    "Reward": "hone.types",
    "RewardConfig": "hone.rewards.settings",
    "RewardFunctionConfig": "hone.rewards.settings",
    "RolloutConfig": "hone.rollout.settings",
    "Row": "hone.types",
    "Sample": "hone.types",
    "SamplingParams": "hone.types",
    "Scorer": "hone.rewards.scorer",
    "SourceConfig": "hone.data.settings",
    "Trainer": "hone.trainer.trainer",
    "TrainerConfig": "hone.trainer.settings",
    "WeightSync": "hone.weights.sync",
    "alias_module": "hone.models.decoder",
    "decoder": "hone.models.tokenizer",
    "eos_token_ids": "hone.models.support",
    "load_model": "hone.models.load",
    "load_prompts": "hone.data.prompts",
    "load_tokenizer": "hone.models.tokenizer",
    "to_scalars": "hone.observe.metrics",
}
"""Module of each component, by public name; `:NAME` is its name there, where that differs. All
other public names are in `hone.api`, which loads the command line."""

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
    "DataPage",
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
    "data_check",
    "data_show",
    "data_stats",
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
