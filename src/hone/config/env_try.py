"""What `hone env` reads of a recipe: the environment, rows, rewards, and the model's tokenizer."""

from __future__ import annotations

from hone.config.base import Section
from hone.config.run import GenerateRunConfig
from hone.config.tree import EvaluateDataConfig
from hone.models.settings import ModelConfig
from hone.rewards.settings import RewardConfig
from hone.rollout.settings import EnvConfig, GenerationConfig, RolloutConfig

__all__ = ["EnvTryConfig", "UntrainedModelConfig"]


class UntrainedModelConfig(ModelConfig):
    """The model, of which only the tokenizer and its chat template count."""

    path: str = ""
    """Folder in the Hugging Face layout, or a hub name such as `Qwen/Qwen3-0.6B`. Unset: texts are
    not turned into tokens."""


class EnvTryConfig(Section):
    """`hone env`: play and check an environment without a model and a trainer."""

    run: GenerateRunConfig = GenerateRunConfig()
    model: UntrainedModelConfig = UntrainedModelConfig()
    data: EvaluateDataConfig = EvaluateDataConfig()
    env: EnvConfig = EnvConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    generation: GenerationConfig = GenerationConfig()
    """The length of a recipe of `hone generate`, which has no section `rollout`."""

    @property
    def max_completion_tokens(self) -> int:
        """Longest episode after the prompt, in tokens."""
        fields = self.model_fields_set
        is_generated = "generation" in fields and "rollout" not in fields
        return (self.generation if is_generated else self.rollout).max_completion_tokens
