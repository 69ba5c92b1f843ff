"""The algorithm that a configuration asks for."""

from __future__ import annotations

from typing import Any

from hone.algorithms.algorithm import Algorithm
from hone.algorithms.distillation import Distillation
from hone.algorithms.grpo import GRPO
from hone.algorithms.ppo import PPO
from hone.algorithms.sft import SFT
from hone.config.tree import RLConfig, SFTConfig

__all__ = ["algorithm_of"]


def algorithm_of(cfg: RLConfig | SFTConfig) -> Algorithm[Any]:
    """Of `hone rl` or `hone sft`; what a step collects is theirs."""
    if isinstance(cfg, SFTConfig):
        return SFT()
    longest = cfg.rollout.max_completion_tokens
    if cfg.algorithm.needs_critic:
        return PPO(cfg.algorithm, cfg.critic, max_completion_tokens=longest)
    if cfg.teacher.path is not None:
        return Distillation(cfg.algorithm, cfg.teacher, max_completion_tokens=longest)
    return GRPO(cfg.algorithm, max_completion_tokens=longest)
