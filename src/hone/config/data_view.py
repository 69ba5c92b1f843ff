"""What `hone data` reads of a recipe: the tree of the command that it is for, without a model that
it must name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from hone.config.tree import (
    DPOConfig,
    EvaluateDataConfig,
    RewardModelingConfig,
    RLConfig,
    SFTConfig,
)
from hone.models.settings import TrainedModelConfig

__all__ = [
    "VIEWS",
    "DemonstrationsViewConfig",
    "PairsViewConfig",
    "PromptsViewConfig",
    "RewardModelingViewConfig",
    "ViewConfig",
]


class ViewedModelConfig(TrainedModelConfig):
    """The model, of which only the tokenizer, its chat template and the context count."""

    path: str = ""
    """Folder in the Hugging Face layout, or a hub name such as `Qwen/Qwen3-0.6B`. Unset: texts are
    not turned into tokens."""


# Sections are frozen, so that narrower types are sound.
class PromptsViewConfig(RLConfig):
    """`hone data` of rows that `hone rl` would read."""

    model: ViewedModelConfig = ViewedModelConfig()  # pyright: ignore[reportIncompatibleVariableOverride]
    data: EvaluateDataConfig = EvaluateDataConfig()  # pyright: ignore[reportIncompatibleVariableOverride]


class DemonstrationsViewConfig(SFTConfig):
    """`hone data` of rows that `hone sft` would read."""

    model: ViewedModelConfig = ViewedModelConfig()  # pyright: ignore[reportIncompatibleVariableOverride]


class PairsViewConfig(DPOConfig):
    """`hone data` of rows that `hone dpo` would read."""

    model: ViewedModelConfig = ViewedModelConfig()  # pyright: ignore[reportIncompatibleVariableOverride]


class RewardModelingViewConfig(RewardModelingConfig):
    """`hone data` of rows that `hone reward-model` would read."""

    model: ViewedModelConfig = ViewedModelConfig()  # pyright: ignore[reportIncompatibleVariableOverride]


ViewConfig: TypeAlias = (
    PromptsViewConfig | DemonstrationsViewConfig | PairsViewConfig | RewardModelingViewConfig
)

VIEWS: Mapping[str, type[ViewConfig]] = {
    "rl": PromptsViewConfig,
    "sft": DemonstrationsViewConfig,
    "dpo": PairsViewConfig,
    "reward-model": RewardModelingViewConfig,
}
"""Trees by the command that would read the rows."""
